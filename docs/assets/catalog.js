// Filters the table of cells. Without JavaScript the table is simply whole.
// The choice is kept in the address, so that a filtered table can be linked to.

const SELECTS = [
  { key: "family", label: "Family" },
  { key: "jacStructure", label: "Jacobian class" },
  { key: "fidelity", label: "Fidelity" },
  { key: "path", label: "Parallel path" },
];

// A row may carry several labels: "research-variant / paper-core".
const labels = (row, key) =>
  (row.dataset[key] ?? "").split("/").map((label) => label.trim()).filter(Boolean);

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function setUp(table) {
  const rows = [...table.tBodies[0].rows];

  const text = element("input", { type: "search", id: "filter-text", placeholder: "name, symbol, source" });
  const fields = [element("div", {}, element("label", { for: "filter-text" }, "Search"), text)];
  const selects = new Map();
  for (const { key, label } of SELECTS) {
    const values = [...new Set(rows.flatMap((row) => labels(row, key)))].sort();
    if (values.length === 0) continue;
    const select = element("select", { id: `filter-${key}` }, element("option", { value: "" }, "any"));
    for (const value of values) select.append(element("option", { value }, value));
    selects.set(key, select);
    fields.push(element("div", {}, element("label", { for: select.id }, label), select));
  }
  const clear = element("button", { type: "button" }, "Clear");
  const count = element("p", { role: "status", class: "catalog-count" });
  const form = element("form", { class: "catalog-filter", "aria-label": "Filter the cells" }, ...fields, clear);
  form.addEventListener("submit", (event) => event.preventDefault());

  (table.closest(".table-box") ?? table).before(form, count);

  function apply() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      const fits =
        words.every((word) => content.includes(word)) &&
        [...selects].every(([key, { value }]) => !value || labels(row, key).includes(value));
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${rows.length} cells`;
    clear.disabled = !text.value && [...selects.values()].every((select) => !select.value);
  }

  function remember() {
    const chosen = new URLSearchParams();
    if (text.value.trim()) chosen.set("text", text.value.trim());
    for (const [key, { value }] of selects) if (value) chosen.set(key, value);
    history.replaceState(null, "", chosen.size ? `#${chosen}` : location.pathname + location.search);
  }

  function recall() {
    const chosen = new URLSearchParams(location.hash.slice(1));
    text.value = chosen.get("text") ?? "";
    for (const [key, select] of selects) {
      select.value = chosen.get(key) ?? "";
      if (select.selectedIndex < 0) select.value = "";
    }
    apply();
  }

  form.addEventListener("input", () => {
    apply();
    remember();
  });
  clear.addEventListener("click", () => {
    text.value = "";
    for (const select of selects.values()) select.value = "";
    apply();
    remember();
    text.focus();
  });
  addEventListener("hashchange", recall);
  recall();
}

for (const table of document.querySelectorAll("table.catalog")) setUp(table);
