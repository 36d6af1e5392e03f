const narrow = matchMedia("(max-width: 40rem)");
const touch = matchMedia("(pointer: coarse)");
const figures = JSON.parse(document.getElementById("figures").textContent);

function draw(section) {
  const view = figures[section.dataset.view][section.querySelector("select")?.selectedIndex ?? 0];
  const box = section.querySelector(".panels");
  box.querySelectorAll(".plot").forEach(plot => Plotly.purge(plot));
  box.classList.toggle("single", view.panels.length === 1);
  box.replaceChildren(...view.panels.map(panel => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = panel.title;
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", panel.alt);
    figure.append(caption, plot);
    return figure;
  }));
  section.querySelector(".summary").textContent = view.text;
  box.querySelectorAll(".plot").forEach((plot, number) => show(plot, view.panels[number]));
}

function show(plot, panel) {
  const layout = structuredClone(panel.layout);
  if (touch.matches) layout.dragmode = false; // a finger scrolls the page
  if (narrow.matches && panel.layout.showlegend !== false) { // the legend goes below the plot
    const entries = panel.data.filter(trace => trace.showlegend !== false).length;
    const title = {...layout.legend?.title, side: "top"};
    layout.legend = {...layout.legend, title, orientation: "h", y: -0.2, yanchor: "top", x: 0};
    layout.height += 18 * (entries + 1);
  }
  Plotly.newPlot(plot, structuredClone(panel.data), layout, {displayModeBar: false, responsive: true});
  const measure = () => { // so that print can scale the drawing to the paper
    const {width, height} = plot._fullLayout;
    plot.style.setProperty("--shape", `${width} / ${height}`);
    plot.querySelectorAll(".main-svg").forEach(svg => svg.setAttribute("viewBox", `0 0 ${width} ${height}`));
  };
  plot.on("plotly_afterplot", measure);
  measure();
}

const sections = [...document.querySelectorAll("section[data-view]")];
for (const section of sections) {
  section.querySelector("select")?.addEventListener("change", () => draw(section));
  draw(section);
}
narrow.addEventListener("change", () => sections.forEach(draw));

function key(row, column) {
  const cell = row.cells[column], text = cell.dataset.value ?? cell.textContent.trim();
  return text === "" || isNaN(text) ? text : Number(text);
}

function compare(a, b, up) {
  if (a === "" || b === "") return (a === "") - (b === ""); // what was not measured stays below
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return up ? order : -order;
}

function press(button, act) { // a true button would be missing where print repeats the head of a table
  button.addEventListener("click", act);
  button.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => press(head.querySelector("[role=button]"), () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => compare(key(a, column), key(b, column), up));
    table.tBodies[0].append(...rows);
  }));
}

for (const box of document.querySelectorAll(".spread")) { // say where a table goes on beyond the window
  const hint = document.createElement("p");
  hint.className = "soft hint";
  hint.textContent = "Scroll sideways for more columns \u2192";
  box.before(hint);
  new ResizeObserver(() => { hint.hidden = box.scrollWidth <= box.clientWidth + 1; }).observe(box);
}

const search = document.getElementById("search");
search?.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...document.querySelectorAll("#attacks tbody tr")];
  for (const row of rows) {
    const labels = [...row.cells].filter(cell => !cell.classList.contains("measure")).map(cell => cell.textContent.trim());
    row.hidden = !words.every(word => labels.join(" ").toLowerCase().includes(word));
  }
  document.getElementById("matches").textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
});

const enlarged = document.getElementById("enlarged");
for (const button of document.querySelectorAll(".card .picture")) {
  button.addEventListener("click", () => { // the picture, beside its truth
    const own = button.closest("figure"), truth = button.closest(".card").querySelector(".truth");
    const shown = truth && truth !== own ? [truth, own] : [own];
    enlarged.querySelector(".pictures").replaceChildren(...shown.map(figure => figure.cloneNode(true)));
    enlarged.showModal();
  });
}
enlarged?.addEventListener("click", () => enlarged.close()); // anywhere; the Escape key is the browser's own
