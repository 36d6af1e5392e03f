"""Check the words of code and pages: docstrings, sentences, and the names of classes, functions and variables.

Rules (CONTRIBUTING.md): a docstring starts with a verb or a noun, never with What, Who, Whether and the like.
A sentence has at most 25 words, in docstrings and in the pages of PAGES. No two classes share a name.
No variable is called found, made, given, told, each or own; fields of records still may.
No function is named by a participle (`joined`, `drawn_rows`): a function does something, so it is a verb.
Records in docs/decisions.md have at most 120 words.

    python .ci/words.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

OPENINGS = ("What", "Who", "Whose", "Whether", "How", "Which", "Where", "When", "Why", "Of", "By", "With", "As")
NAMES = ("found", "made", "given", "told", "each", "own")
PARTICIPLES = re.compile(r"_*([a-z]*ed|drawn|given|held|kept|known|learnt|made|seen|sent|shown|spent|taken|told)(_|$)")
VERBS = ("embed", "feed", "need", "seed")  # end like participles
NOUNS = ("expected", "paired", "printed", "squared")  # with a noun: terms of the papers
WORDS = 25
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
RECORDS = Path("docs/decisions.md")
RECORD_WORDS = 120


def problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the problem of each broken rule of one file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {part.target for node in classes for part in node.body if isinstance(part, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line = getattr(node, "lineno", 1)
            yield from ((line, problem) for problem in docstring_problems(ast.get_docstring(node) or ""))
        if isinstance(node, ast.FunctionDef) and (problem := name_problem(node)):
            yield node.lineno, problem
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES and node not in fields:
            yield node.lineno, f"variable {node.id}: name it by its content"
        if isinstance(node, ast.arg) and node.arg in NAMES:
            yield node.lineno, f"argument {node.arg}: name it by its content"


def name_problem(node: ast.FunctionDef) -> str | None:
    """Return the problem of a function's name; properties, context managers and yes-or-no answers may be adjectives."""
    words = PARTICIPLES.match(node.name)
    free = any("property" in ast.unparse(part) or "contextmanager" in ast.unparse(part) for part in node.decorator_list)
    answers = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
    if words is None or free or answers or words[1] in VERBS or (words[1] in NOUNS and words[2]):
        return None
    return f"function {node.name}: name it by a verb"


def docstring_problems(text: str) -> Iterator[str]:
    """Yield the problems of a docstring; examples, tables and code are left out."""
    prose = re.sub(r"(?s)\n\s*(Example|Examples|Args|Returns|Raises|Yields):\n.*", "", text)
    lines = [line for line in prose.splitlines() if not re.match(r"\s{4}|\S+\s{3,}\S|\|", line)]  # no code, no tables
    prose = re.sub(r"`[^`]*`", "x", "\n".join(lines))
    if (word := prose.split(" ")[0]) in OPENINGS:
        yield f"docstring starts with {word!r}"
    yield from long_sentences(prose)


def long_sentences(prose: str) -> Iterator[str]:
    """Yield the sentences that have too many words; numbers and signs are no words."""
    for sentence in re.split(r"(?<=[.!?;:])\s+|\n\s*\n", prose):
        count = len(re.findall(r"[^\s]*[A-Za-z][^\s]*", sentence))
        if count > WORDS:
            yield f"sentence of {count} words: {' '.join(sentence.split())[:60]} ..."


def page_problems(text: str) -> Iterator[str]:
    """Yield the long sentences of a page in Markdown; code, tables and addresses are left out."""
    prose = re.sub(r"(?ms)^```.*?^```$", "\n\n", text)
    prose = re.sub(r"(?m)^(#.*|\|.*| {4}.*)$", "\n", prose)
    prose = re.sub(r"(?m)^\s*([-*]|\d+\.) ", "\n\n", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose.replace("**", ""))
    yield from long_sentences(re.sub(r"`[^`]*`", "x", prose))


def record_problems(text: str) -> Iterator[str]:
    """Yield the problems of the numbered records of decisions."""
    for record in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = record.partition("\n")
        plain = re.sub(r"`[^`]*`|\([^)]*\.py\)", "x", body.replace("**", ""))
        if (count := len(plain.split())) > RECORD_WORDS:
            yield f"{RECORDS}: {title}: {count} words"


def doubles(paths: list[Path]) -> Iterator[str]:
    """Yield the class names that are defined in two modules."""
    homes = defaultdict(list)
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    for name, where in sorted(homes.items()):
        if len(where) > 1:
            yield f"class {name} is defined {len(where)} times: {', '.join(map(str, where))}"


def main(folders: list[str]) -> int:
    """Check the folders, print the problems, return the exit code."""
    paths = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    lines = [f"{path}:{line}: {problem}" for path in paths for line, problem in problems(path)]
    lines += doubles(paths)
    pages = [page for pattern in PAGES for page in sorted(Path().glob(pattern))]
    lines += (f"{page}: {line}" for page in pages for line in page_problems(page.read_text(encoding="utf-8")))
    lines += record_problems(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else []
    print("\n".join(lines) if lines else f"words: {len(paths) + len(pages)} files, no problem")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["src"]))
