// Samples: what was asked, answered and scored; of a comparison, two evaluations side by side with what flipped.

if (DATA.samples) PARTS.push({ id: "samples", name: "Samples", make: samplesPart });

const AT_ONCE = 50; // samples listed at once
const [ID, PROMPT, CHOICES, ANSWERS, FILTERED, TARGET, VALUES, FILTER, HASH] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

function samplesPart() {
  if (!DATA.samples.length) return section("samples", "Samples", "There are no samples.");
  const list = el("div", { class: "samples" }), count = el("p", { class: "note", role: "status" });
  const state = { task: 0, text: "", only: "all", filter: "", rows: [] };
  const filters = el("span");
  const pairs = DATA.kind === "comparison";
  const load = async () => {
    const one = DATA.samples[state.task];
    count.textContent = "unpacking…";
    state.rows = pairs ? paired(...await Promise.all(one.blocks.map((b) => (b ? unpacked(b) : [])))) : (await unpacked(one.block)).map((row) => [row]);
    const names = [...new Set(state.rows.map((sides) => sides[0][FILTER]))];
    state.filter = names[0];
    filters.replaceChildren(...(names.length > 1 ? [choice("filter", names.map((name) => [name, name]), (v) => { state.filter = v; draw(); })] : []));
    draw();
  };
  const draw = () => {
    const rows = state.rows.filter((sides) => sides[0][FILTER] === state.filter), kept = rows.filter((sides) => wanted(sides, state));
    const worse = pairs ? rows.filter((sides) => mark(sides) === "worse").length : 0, better = pairs ? rows.filter((sides) => mark(sides) === "better").length : 0;
    const one = DATA.samples[state.task];
    const left = one.of > one.samples ? ` The page holds the first ${one.samples.toLocaleString("en")} of ${one.of.toLocaleString("en")}; all are in the evaluation's samples.` : "";
    count.textContent = `${kept.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples.${pairs ? ` Flipped: ${better} better, ${worse} worse.` : ""}${one.broken ? ` ${one.broken} lines of its file cannot be read.` : ""}${left}`;
    list.replaceChildren();
    more(list, kept, 0, pairs);
  };
  const kinds = pairs ? [["flipped", "flipped"], ["worse", "worse in the last"], ["better", "better in the last"], ["all", "all"]] : [["all", "all"], ["wrong", "below the best value"], ["right", "with the best value"]];
  state.only = kinds[0][0];
  const tools = el("div", { class: "tools" }, choice("task", DATA.samples.map((s, i) => [i, `${s.task} (${s.of.toLocaleString("en")})`]), (v) => { state.task = Number(v); load(); }), filters,
    choice("show", kinds, (v) => { state.only = v; draw(); }), search("find text", (v) => { state.text = v; draw(); }));
  const made = section("samples", "Samples", null, tools, count, list);
  requestIdleCallback(load); // not at the first look, yet before a print
  return made;
}

/** Samples of the same document and filter of two evaluations. */
function paired(first, last) {
  const key = (row) => `${row[ID]}\u0000${row[FILTER]}\u0000${row[HASH]}`;
  const before = new Map(first.map((row) => [key(row), row]));
  return last.filter((row) => before.has(key(row))).map((row) => [before.get(key(row)), row]);
}

/** The sample's first value that is a number. */
const worth = (row) => Object.values(row[VALUES]).find((v) => typeof v === "number") ?? null;

function wanted(sides, { text, only }) {
  const values = sides.map(worth), last = values.at(-1);
  if (only === "wrong" && !(last !== null && last < 1)) return false;
  if (only === "right" && !(last !== null && last >= 1)) return false;
  if (only === "flipped" && values[0] === values[1]) return false;
  if (only === "worse" && !(values[1] < values[0])) return false;
  if (only === "better" && !(values[1] > values[0])) return false;
  return !text || sides.some((row) => [row[PROMPT], row[TARGET], ...row[ANSWERS]].some((part) => String(part).toLowerCase().includes(text)));
}

function more(list, rows, from, pairs) {
  list.append(...rows.slice(from, from + AT_ONCE).map((sides) => sampleItem(sides, pairs)));
  if (rows.length <= from + AT_ONCE) return;
  const button = el("button", { type: "button", class: "more", text: `${(rows.length - from - AT_ONCE).toLocaleString("en")} more`, onclick: () => { button.remove(); more(list, rows, from + AT_ONCE, pairs); } });
  list.append(button);
}

function sampleItem(sides, pairs) {
  const row = sides.at(-1);
  const filter = row[FILTER] && row[FILTER] !== "none" ? `,${row[FILTER]}` : "";
  const values = Object.keys(row[VALUES]).map((name) => `${name}${filter} ${sides.map((side) => shortValue(side[VALUES][name])).join(" → ")}`).join(", ");
  const made = el("details", { class: `sample ${mark(sides)}` }, el("summary", {}, el("span", { class: "number", text: `#${row[ID]}` }), " ", said(ending(row[PROMPT]), "said one-line"), el("span", { class: "values" }, said(values))));
  made.addEventListener("toggle", () => { if (made.open && made.children.length === 1) made.append(sampleBody(sides, pairs)); });
  return made;
}

/** The end of a prompt, where the question stands. */
const ending = (text) => (text.length <= 160 ? text : `… ${text.slice(-160).replace(/^\S*\s/, "")}`);

const shortValue = (v) => (typeof v === "number" ? NUMBER.format(v) : String(v ?? "–").slice(0, 60));

function mark(sides) {
  const values = sides.map(worth);
  if (sides.length === 2) return values[1] < values[0] ? "worse" : values[1] > values[0] ? "better" : "";
  return values[0] === null ? "" : values[0] >= 1 ? "better" : "worse";
}

function sampleBody(sides, pairs) {
  const row = sides.at(-1);
  const heads = pairs ? DATA.heads.length === 2 ? DATA.heads : [DATA.heads[0], DATA.heads.at(-1)] : [""];
  const answers = sides.map((side, i) => el("div", {}, pairs ? el("h4", {}, said(heads[i])) : null, answersOf(side)));
  return el("div", { class: "body" }, el("h4", { text: "asked" }), el("pre", { tabindex: 0 }, said(row[PROMPT])), el("h4", { text: "gold" }), el("pre", { tabindex: 0 }, said(row[TARGET])), el("div", { class: pairs ? "sides" : null }, answers));
}

/** Choices with their log-likelihoods. The gold one is named by its place or its text. */
function choicesOf(row) {
  const worths = row[ANSWERS].map(parseFloat), most = Math.max(...worths);
  return el("table", {}, el("tbody", {}, row[CHOICES].map((text, i) => {
    const gold = row[TARGET] === String(i) || row[TARGET] === text;
    const words = [gold ? "gold" : "", worths[i] === most ? "most likely" : ""].filter(Boolean).join(", ");
    return el("tr", {}, el("td", {}, said(text)), el("td", { class: "right", text: Number.isFinite(worths[i]) ? worths[i].toFixed(3) : "–" }), el("td", { class: "soft", text: words }));
  })));
}

function answersOf(row) {
  if (row[CHOICES].length) return choicesOf(row);
  const parts = [el("h4", { text: "answered" }), ...row[ANSWERS].map((a) => el("pre", { tabindex: 0 }, said(a)))];
  if (row[FILTERED].length) parts.push(el("h4", {}, "after the filter ", said(row[FILTER])), ...row[FILTERED].map((a) => el("pre", { tabindex: 0 }, said(a))));
  return el("div", {}, parts);
}
