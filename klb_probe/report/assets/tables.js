// Tables as commands print them, and the page of outputs that are tables alone.

function table(one, className = "") {
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": one.title || "table" },
    h("table", { class: className }, one.title && h("caption", {}, one.title),
      h("thead", {}, h("tr", {}, one.columns.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, one.rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell == null ? "" : String(cell))))))));
}

const sentences = (lines) => lines.map((line) => h("p", {}, line));
const limits = (lines) => lines.length > 0 && h("details", { open: lines.length < 3 }, h("summary", {}, "What this does not show"),
  lines.map((line) => h("p", { class: "quiet" }, line)));

function tablesView(about, host) {
  put(host, about.tables.map((one) => table(one)), sentences(about.says), limits(about.limits));
}
