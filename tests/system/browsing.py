"""What the tests in a browser ask of a page."""


def lightness(page, selector, what):
    # a plot that is drawn anew leaves nodes behind that have no style: ask until one that is shown answers
    ask = "([s, what]) => { const node = document.querySelector(s); return node && getComputedStyle(node)[what]; }"
    colour = page.wait_for_function(ask, arg=[selector, what]).json_value()
    return sum(float(x) for x in colour[colour.index("(") + 1 : -1].split(",")[:3]) / 3


def cut_off(page, width):
    """Tables of which a part lies outside of their frame, and cells outside of the window, at this width."""
    page.set_viewport_size({"width": width, "height": 900})
    page.reload()
    return page.evaluate(
        """() => [...document.querySelectorAll(".spread")].filter(box => box.scrollWidth > box.clientWidth + 1)
          .map(box => box.getAttribute("aria-label"))
          .concat([...document.querySelectorAll(".sortable td")]
            .filter(cell => { const box = cell.getBoundingClientRect();
              return box.width && (box.left < 0 || box.right > document.documentElement.clientWidth); })
            .map(cell => cell.textContent.trim()))"""
    )


def overlong(page):
    """What sticks out of the window although nothing lets it scroll."""
    return page.evaluate(
        """() => [...document.querySelectorAll("body *")]
          .filter(node => !node.closest(".scroll, pre, svg, details"))
          .filter(node => node.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
          .map(node => node.outerHTML.slice(0, 80))"""
    )
