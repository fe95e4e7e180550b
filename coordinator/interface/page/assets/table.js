// A table whose columns sort. Long ones show their first rows and a button for more.

const FIRST_ROWS = 100;

/** `columns`: {name, of(row) → value that sorts, show(row) → text or element (default: the value), right, wide: not on a phone}. `order`: [column, ascending];
 * `key`: of the address, which keeps another order. */
function table(columns, rows, { order = null, label, key, none: empty = "None." } = {}) {
  const [name, way] = (STATE.get(key) ?? "").split("~"), kept = columns.findIndex((c) => c.name === name);
  let [by, up] = kept >= 0 ? [kept, way === "up"] : order ?? [null, true];
  let shown = FIRST_ROWS;
  const body = el("tbody");
  const more = el("button", { type: "button", class: "more", onclick: () => { shown += 10 * FIRST_ROWS; fill(); } });
  const heads = columns.map((column, i) => {
    const button = el("button", { type: "button", text: column.name, onclick: () => { up = by === i ? !up : !column.right; by = i; if (key) remember(key, `${column.name}~${up ? "up" : "down"}`); fill(); } });
    return el("th", { scope: "col", class: classOf(column) }, button);
  });
  const made = el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, heads)), body);
  const none = el("p", { class: "note", text: empty });
  function fill() {
    [made.hidden, none.hidden] = [!rows.length, rows.length > 0];
    const sorted = by === null ? [...rows] : rows.toSorted((a, b) => compared(columns[by].of(a), columns[by].of(b)) * (up ? 1 : -1));
    heads.forEach((head, i) => head.setAttribute("aria-sort", by === i ? (up ? "ascending" : "descending") : "none"));
    body.replaceChildren(...sorted.slice(0, shown).map((row) => rowOf(columns, row)));
    more.hidden = rows.length <= shown;
    more.textContent = `${(rows.length - shown).toLocaleString("en")} more rows`;
  }
  fill();
  const holder = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `table: ${label}` }, made, none, more);
  holder.show = (others) => { rows = others; shown = FIRST_ROWS; fill(); };
  return holder;
}

const classOf = ({ right, wide }) => [right && "right", wide && "wide"].filter(Boolean).join(" ") || null;

function rowOf(columns, row) {
  return el("tr", {}, columns.map((column) => {
    const value = column.show ? column.show(row) : column.of(row);
    return el("td", { class: classOf(column) }, value instanceof Node ? value : breaking(said(value ?? "–")));
  }));
}

/** The same text, whose long names may break after their parts. */
function breaking(text) {
  const parts = text.textContent.split(/(?<=[_/|]|,(?!\d))/);
  if (parts.length > 1) text.replaceChildren(...parts.flatMap((part) => [part, el("wbr")]));
  return text;
}

/** Order of two cells; those without a value come last. */
function compared(a, b) {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Boxes that choose evaluations, and what compares them. `order`: all ids, the first one that is chosen is the baseline. */
function boxes(order) {
  const chosen = new Set(), bar = el("span", { class: "field", role: "status" });
  const show = () => {
    const ids = order.filter((id) => chosen.has(id));
    bar.replaceChildren(ids.length < 2 ? "Choose two evaluations to compare them." : DATA.mark ? el("a", { class: "button", href: address.compare(ids), text: `compare ${ids.length} evaluations` }) : command(`evalspan compare ${ids.map(quoted).join(" ")}`));
  };
  show();
  const column = (idOf) => ({ name: "compare", of: (row) => (chosen.has(idOf(row)) ? 0 : 1), show: (row) => {
    const id = idOf(row);
    return el("input", { type: "checkbox", checked: chosen.has(id), "aria-label": `compare ${id}`, onchange: (event) => { event.target.checked ? chosen.add(id) : chosen.delete(id); show(); } });
  } });
  return { bar, column };
}
