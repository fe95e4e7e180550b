// Samples: what was asked, answered and scored; of a comparison, two evaluations side by side with what flipped. The keys n
// and p open the next and the previous one.

if (DATA.samples) {
  PARTS.push({ id: "samples", name: "Samples", make: samplesPart });
  addEventListener("keydown", (event) => {
    if (event.target.closest?.("input, select, textarea") || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "n" || event.key === "p") turnTo(event.key === "n");
  });
}

const AT_ONCE = 50; // samples listed at once
const MOST_CELLS = 1_000_000; // words of one answer times words of the other, between which differences are looked for
const [ID, PROMPT, CHOICES, ANSWERS, FILTERED, TARGET, VALUES, FILTER, HASH, LATER] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

function samplesPart() {
  if (!DATA.samples.length) return section("samples", "Samples", "There are no samples.");
  const list = el("div", { class: "samples" }), count = el("p", { class: "note", role: "status" });
  const pairs = DATA.kind === "comparison", filters = el("span");
  const kinds = pairs ? [["flipped", "flipped"], ["worse", "worse in the last"], ["better", "better in the last"], ["all", "all"]] : [["all", "all"], ["wrong", "below the best value"], ["right", "with the best value"]];
  const state = { task: Math.max(0, DATA.samples.findIndex((s) => s.task === STATE.get("task"))), text: sought("words"), only: STATE.get("only") ?? kinds[0][0], filter: "", rows: [] };
  const load = async () => {
    const one = DATA.samples[state.task];
    count.textContent = "unpacking…";
    state.rows = pairs ? paired(...await Promise.all(one.blocks.map((b) => (b ? unpacked(b) : [])))) : (await unpacked(one.block)).map((row) => [row]);
    const names = [...new Set(state.rows.map((sides) => sides[0][FILTER]))];
    state.filter = names.includes(STATE.get("filter")) ? STATE.get("filter") : names[0];
    filters.replaceChildren(...(names.length > 1 ? [choice("filter", names.map((name) => [name, name]), (v) => { state.filter = v; draw(); }, "filter")] : []));
    draw();
  };
  const draw = () => {
    const rows = state.rows.filter((sides) => sides[0][FILTER] === state.filter), kept = rows.filter((sides) => wanted(sides, state));
    const worse = pairs ? rows.filter((sides) => mark(sides) === "worse").length : 0, better = pairs ? rows.filter((sides) => mark(sides) === "better").length : 0;
    const one = DATA.samples[state.task];
    const left = one.of > one.samples ? ` The page holds ${one.samples.toLocaleString("en")} of ${one.of.toLocaleString("en")}, ${pairs ? "those that flipped" : "those below the best value"} first; all are in the evaluation's samples.` : "";
    count.textContent = `${kept.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples.${pairs ? ` Flipped: ${better} better, ${worse} worse.` : ""}${one.broken ? ` ${one.broken} lines of its file cannot be read.` : ""}${left} Keys: n opens the next one, p the one before.`;
    list.replaceChildren();
    more(list, kept, 0, pairs);
    const at = kept.findIndex(([row]) => String(row[ID]) === STATE.get("sample"));
    if (at >= 0 && at < AT_ONCE) list.children[at].open = true;
  };
  const tools = el("div", { class: "tools" }, choice("task", DATA.samples.map((s) => [s.task, `${s.task} (${s.of.toLocaleString("en")})`]), (v) => { state.task = DATA.samples.findIndex((s) => s.task === v); remember("sample", null); load(); }, "task"), filters,
    choice("show", kinds, (v) => { state.only = v; draw(); }, "only"), search("find text", (v) => { state.text = v; draw(); }, "words"));
  const made = section("samples", "Samples", null, tools, count, list);
  requestIdleCallback(load); // not at the first look, yet before a print
  return made;
}

/** Close the sample that is open, and open the one after or before it. */
function turnTo(next) {
  const all = [...document.querySelectorAll(".sample")], now = all.findLastIndex((one) => one.open), at = now < 0 ? (next ? 0 : -1) : now + (next ? 1 : -1);
  if (at === all.length) document.querySelector(".samples .more")?.click();
  const one = document.querySelectorAll(".sample")[at];
  if (!one) return;
  if (now >= 0) all[now].open = false;
  one.open = true;
  one.scrollIntoView({ block: "start" });
  one.querySelector("summary").focus({ preventScroll: true });
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
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(sampleBody(sides, pairs));
    if (made.open) remember("sample", row[ID]);
  });
  return made;
}

/** The end of a prompt, where the question stands. */
const ending = (prompt, text = messagesOf(prompt)?.at(-1).content ?? prompt) => (text.length <= 160 ? text : `… ${text.slice(-160).replace(/^\S*\s/, "")}`);

const shortValue = (v) => (typeof v === "number" ? NUMBER.format(v) : String(v ?? "–").slice(0, 60));

function mark(sides) {
  const values = sides.map(worth);
  if (sides.length === 2) return values[1] < values[0] ? "worse" : values[1] > values[0] ? "better" : "";
  return values[0] === null ? "" : values[0] >= 1 ? "better" : "worse";
}

function sampleBody(sides, pairs) {
  const row = sides.at(-1);
  const heads = pairs ? [DATA.heads[0], DATA.heads.at(-1)] : [""], texts = sides.map((side) => side[ANSWERS].flat());
  const differ = pairs && !row[CHOICES].length && texts[0].length === texts[1].length ? texts[0].map((text, i) => marked(text, texts[1][i])) : null;
  const answers = sides.map((side, i) => el("div", {}, pairs ? el("h4", {}, said(heads[i])) : null, answersOf(side, differ?.map((both) => both[i]))));
  return el("div", { class: "body" }, el("h4", { text: "asked" }), promptOf(row[PROMPT]), row[TARGET] ? [el("h4", { text: "gold" }), el("pre", { tabindex: 0 }, said(row[TARGET]))] : null, el("div", { class: pairs ? "sides" : null }, answers));
}

/** The messages of a prompt that is a conversation; null of any other. */
function messagesOf(text) {
  try {
    const found = text.startsWith("[{") ? JSON.parse(text) : null;
    return found.every((m) => typeof m.content === "string") ? found : null;
  } catch { return null; } // a text
}

function promptOf(text) {
  return messagesOf(text)?.map((m) => [el("h4", {}, said(m.role)), el("pre", { tabindex: 0 }, said(m.content))]) ?? el("pre", { tabindex: 0 }, said(text));
}

/** Both texts, in each the words marked that the other does not have at that place. */
function marked(a, b) {
  const [x, y] = [a, b].map((text) => plain(text).split(/(?<=\s)/));
  let [from, m, n] = [0, x.length, y.length];
  while (from < m && from < n && x[from] === y[from]) from += 1;
  while (m > from && n > from && x[m - 1] === y[n - 1]) [m, n] = [m - 1, n - 1];
  const [p, q] = [x.slice(from, m), y.slice(from, n)], wide = q.length + 1, alike = [new Set(), new Set()];
  if (p.length * q.length <= MOST_CELLS) {
    const most = new Uint16Array((p.length + 1) * wide); // words in common of what follows
    for (let i = p.length - 1; i >= 0; i -= 1) for (let j = q.length - 1; j >= 0; j -= 1) most[i * wide + j] = p[i] === q[j] ? most[(i + 1) * wide + j + 1] + 1 : Math.max(most[(i + 1) * wide + j], most[i * wide + j + 1]);
    for (let i = 0, j = 0; i < p.length && j < q.length;) {
      if (p[i] === q[j]) [alike[0].add(i++), alike[1].add(j++)];
      else if (most[(i + 1) * wide + j] >= most[i * wide + j + 1]) i += 1;
      else j += 1;
    }
  }
  return [[x, p, alike[0]], [y, q, alike[1]]].map(([all, middle, same]) => el("bdi", { class: "said" }, all.slice(0, from).join(""), middle.map((word, i) => (same.has(i) ? word : el("mark", { text: word }))), all.slice(from + middle.length).join("")));
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

/** `differ`: the texts of its answers with what differs marked. Of a conversation each answer follows what was asked before. */
function answersOf(row, differ) {
  if (row[CHOICES].length) return choicesOf(row);
  const shown = (text, i) => el("pre", { tabindex: 0 }, differ?.[i] ?? said(text));
  const parts = row[ANSWERS].flatMap((answer) => (Array.isArray(answer) ? answer.flatMap((text, i) => [...(i ? [el("h4", { text: `then asked` }), el("pre", { tabindex: 0 }, said(row[LATER]?.[i - 1] ?? "(the sample does not say it)"))] : []), el("h4", { text: `answered, turn ${i + 1}` }), shown(text, i)]) : [el("h4", { text: "answered" }), shown(answer, 0)]));
  if (row[FILTERED].length) parts.push(el("h4", {}, "after the filter ", said(row[FILTER])), ...row[FILTERED].flat().map((a) => el("pre", { tabindex: 0 }, said(a))));
  return el("div", {}, parts, el("p", { class: "soft" }, said(Object.entries(row[VALUES]).map(([name, v]) => `${name} ${shortValue(v)}`).join(", "))));
}
