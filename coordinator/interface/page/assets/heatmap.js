// Tasks by checkpoints: each cell a score, its colour the change in yardsticks (standard errors of a difference), or its place
// in the row's range. Only what can be seen is drawn, in whole rows and columns.

if (DATA.kind === "training") PARTS.push({ id: "heatmap", name: "Tasks × checkpoints", make: heatmapPart }, { id: "checkpoints", name: "Checkpoints", make: checkpointsPart });

const [NOISE, STRONG] = [2, 4]; // yardsticks of a change up to which it has no colour, and from which the fullest one
const [ROW_PX, COLUMN_PX, HEIGHT] = [26, 74, 0.7]; // of a cell, at least; of the box, of the window's height
const PAPER_PX = 720; // width of a printed page
const KEYS = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1], PageDown: [15, 0], PageUp: [-15, 0], Home: [0, -1e6], End: [0, 1e6] };

function heatmapPart() {
  const which = Number(STATE.get("training")) || 0;
  const map = new Heatmap(DATA.trainings[which] ?? DATA.trainings[0]);
  const change = (name) => (value) => { map[name] = value; map.fill(); };
  const grouped = map.training.groups.length ? [["groups", "groups, folded"]] : [];
  const tools = el("div", { class: "tools" },
    DATA.trainings.length > 1 ? choice("training", DATA.trainings.map((t, i) => [i, `${t.name}, ${t.suite}`]), (v) => { map.training = DATA.trainings[v]; map.fill(); }, "training") : null,
    choice("rows", [...grouped, ["suite", "as in the suite"], ["drop", "largest drop at the last checkpoint first"], ["worse", "worse ones only"]], change("order"), "rows"),
    choice("columns", [["fit", "as many as fit, over the whole training"], ["all", "all checkpoints"]], change("columns"), "columns"),
    choice("colour by", [["evidence", "change from the checkpoint before, beyond two standard errors of a difference"], ["range", "place between the row's worst and best"]], change("by"), "colour"),
    search("find a task", change("text"), "find"));
  map.fill();
  return section("heatmap", "Tasks × checkpoints", "Blue is better, orange is worse. ↓ marks where a drop began, ! the checkpoint that shows it, ~ a score that is not comparable with the one before. Click a cell, or choose it by arrow keys; Enter opens its evaluation, or a group.", tools, map.box);
}

class Heatmap {
  constructor(training) {
    Object.assign(this, { training, by: STATE.get("colour") ?? "evidence", text: sought("find"), order: STATE.get("rows") ?? (training.groups.length ? "groups" : "suite"), columns: STATE.get("columns") ?? "fit" });
    [this.open, this.row, this.column] = [new Set((STATE.get("open") ?? "").split("~").filter(Boolean)), null, null];
    this.table = el("table", { class: "heatmap" });
    this.sizer = el("div", {}, this.table);
    this.detail = el("div", { class: "detail", role: "status", hidden: true });
    this.place = el("div", { class: "heat-box", tabindex: 0, role: "region", "aria-label": "scores by task and checkpoint: arrow keys choose a cell", onscroll: () => this.draw(), onkeydown: (event) => this.key(event), onclick: (event) => this.click(event) }, this.sizer);
    this.box = el("div", { class: "heat-place" }, this.place, this.detail);
    this.place.redraw = () => this.fill();
    new ResizeObserver(() => { if (this.place.clientWidth !== this.width) this.fill(true); }).observe(this.place);
  }

  /** Rows and sizes anew. The newest checkpoints are seen first. */
  fill(resized = this.width === undefined) {
    const { place, training: { points } } = this;
    [this.rows, this.row, this.detail.hidden] = [rowsOf(this), null, true];
    this.width = PRINTING ? PAPER_PX : place.clientWidth; // paper has all rows, and the newest checkpoints that have room
    this.names = this.width < 600 ? 136 : this.width < 900 ? 200 : 300;
    const room = Math.max(1, Math.floor((this.width - this.names) / (PRINTING ? 40 : COLUMN_PX)));
    this.at = this.columns === "all" ? points.map((_, i) => i) : thinned(this.training, room);
    this.shown = Math.min(this.at.length, room);
    this.cell = Math.min(1.6 * COLUMN_PX, (this.width - this.names) / this.shown);
    this.high = PRINTING ? this.rows.length : Math.max(1, Math.min(this.rows.length, Math.floor((HEIGHT * innerHeight) / ROW_PX) - 1));
    this.sizer.style.width = PRINTING ? "auto" : `${this.names + this.at.length * this.cell}px`;
    this.sizer.style.height = PRINTING ? "auto" : `${(this.rows.length + 1) * ROW_PX}px`;
    place.style.height = PRINTING ? "auto" : `${(this.high + 1) * ROW_PX + place.offsetHeight - place.clientHeight}px`;
    if (resized) place.scrollLeft = this.at.length * this.cell;
    this.draw();
  }

  draw() {
    const { points } = this.training;
    this.top = PRINTING ? 0 : Math.min(Math.round(this.place.scrollTop / ROW_PX), this.rows.length - this.high);
    this.left = PRINTING ? this.at.length - this.shown : Math.min(Math.round(this.place.scrollLeft / this.cell), this.at.length - this.shown);
    const columns = this.at.slice(this.left, this.left + this.shown).map((i) => points[i]), width = { width: `${this.cell}px` };
    const heads = columns.map((point) => el("th", { scope: "col", class: "right", title: point.label, style: width }, said(point.label)));
    const rows = this.rows.slice(this.top, this.top + this.high).map((row, i) => el("tr", { "aria-rowindex": this.top + i + 2 }, this.head(row), columns.map((_, at) => this.one(row, this.top + i, this.left + at))));
    this.table.style.width = `${this.names + columns.length * this.cell}px`;
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    this.table.setAttribute("aria-colcount", this.at.length + 1);
    this.table.replaceChildren(el("thead", {}, el("tr", {}, el("th", { scope: "col", style: { width: `${this.names}px` }, text: this.training.groups.length ? "group or task" : "task" }), heads)), el("tbody", {}, rows));
    this.placeDetail();
  }

  head({ group, curve, count, worse }) {
    const name = group ?? curve.task, mark = group ? `${this.open.has(group) || this.text ? "▾" : "▸"} ` : "";
    const more = group ? ` ${count} task${count === 1 ? "" : "s"}${worse ? `, ${worse} worse` : ""}` : ` ${curve.measure}${curve.up ? "" : " (lower is better)"}`;
    return el("th", { scope: "row", class: group ? "group" : null, title: `${name}${more}` }, el("div", { class: "name" }, mark, el("span", { class: "cut" }, said(name)), el("small", { text: more })));
  }

  one({ curve }, row, column) {
    const i = curve?.place[this.at[column]] ?? -1, chosen = row === this.row && column === this.column ? "chosen" : "";
    if (i < 0 || curve.value[i] === null) return el("td", { class: `right ${chosen}`, text: "–" });
    return el("td", { class: `right heat ${shade(this.by === "range" ? inRange(curve, i) : evidence(curve, i))} ${chosen}`, text: `${score(curve.value[i])}${curve.marks[i] ?? ""}` });
  }

  key(event) {
    const step = KEYS[event.key];
    if (!step && event.key !== "Enter" && event.key !== "Escape") return;
    if (event.target !== this.place) return; // a link in the box
    event.preventDefault();
    if (event.key === "Escape") return this.choose(null);
    if (event.key === "Enter") return this.row === null ? null : this.enter();
    if (this.row === null) return this.choose(this.top, this.left + this.shown - 1);
    this.choose(Math.max(0, Math.min(this.rows.length - 1, this.row + step[0])), Math.max(0, Math.min(this.at.length - 1, this.column + step[1])));
  }

  click(event) {
    const cell = event.target.closest("td, th"), row = this.top + (cell?.parentNode.rowIndex ?? 0) - 1;
    if (!cell || row < this.top) return;
    if (cell.tagName === "TH") return this.fold(this.rows[row].group);
    this.choose(row, this.left + cell.cellIndex - 1);
  }

  /** Enter: a group opens or closes, else the cell's evaluation opens. */
  enter() {
    if (this.rows[this.row].group) return this.fold(this.rows[this.row].group);
    if (DATA.mark) location.assign(address.evaluation(this.training.points[this.at[this.column]].evaluation_id));
  }

  fold(group) {
    if (!group) return;
    const { row, column } = this;
    this.open.delete(group) || this.open.add(group);
    remember("open", [...this.open].join("~"));
    this.fill();
    if (row !== null) this.choose(row, column);
  }

  choose(row, column) {
    [this.row, this.column] = [row, column];
    this.detail.hidden = row === null;
    if (row !== null) {
      const { curve } = this.rows[row], i = curve?.place[this.at[column]] ?? -1;
      this.detail.replaceChildren(i < 0 || curve.value[i] === null ? el("p", { text: "There is no score here." }) : cellDetail(this.training, curve, i));
      this.place.scrollTop = Math.max(Math.min(this.place.scrollTop, row * ROW_PX), (row + 1 - this.high) * ROW_PX);
      this.place.scrollLeft = Math.max(Math.min(this.place.scrollLeft, column * this.cell), (column + 1 - this.shown) * this.cell);
    }
    this.draw();
  }

  /** The detail stands below its cell, or above where there is no room. */
  placeDetail() {
    const cell = this.table.querySelector(".chosen"), { detail, box } = this;
    detail.hidden = !cell;
    if (!cell) return;
    const [at, whole] = [cell.getBoundingClientRect(), box.getBoundingClientRect()], below = at.bottom + detail.offsetHeight < Math.max(innerHeight, whole.bottom);
    detail.style.left = `${Math.max(0, Math.min(at.left - whole.left, whole.width - detail.offsetWidth))}px`;
    detail.style.top = `${(below ? at.bottom + 4 : at.top - detail.offsetHeight - 4) - whole.top}px`;
  }
}

/** Every k-th checkpoint up to the last one, so that all fit into `room`; of each k one where a score's drop began or shows. */
function thinned({ points, curves }, room) {
  const k = Math.ceil(points.length / room), told = new Set(curves.flatMap((c) => c.drops.flatMap((d) => [c.at[d.since], c.at[d.at]])));
  const found = [];
  for (let end = points.length - 1; end >= 0; end -= k) {
    const near = Array.from({ length: Math.min(k, end + 1) }, (_, i) => end - i);
    found.unshift(near.find((i) => told.has(i)) ?? end);
  }
  return found;
}

/** Rows as {curve, group, count, worse}: `group` of one that folds. */
function rowsOf({ training, order, text, open }) {
  const wanted = training.curves.filter((c) => `${c.task} ${c.measure}`.toLowerCase().includes(text)).map((curve) => ({ curve }));
  if (order === "worse") return wanted.filter((r) => r.curve.drops.length);
  const change = (c) => (c.at.at(-1) === training.points.length - 1 ? evidence(c, c.at.length - 1) : null) ?? 2;
  if (order === "drop") return wanted.toSorted((a, b) => change(a.curve) - change(b.curve));
  if (order !== "groups" || !training.groups.length) return wanted;
  const members = new Map(training.groups.flatMap(([group, names]) => [group, ...names].map((name) => [name, group])));
  const folded = training.groups.flatMap(([group]) => {
    const inside = wanted.filter((r) => members.get(r.curve.task) === group && r.curve.task !== group);
    const own = training.curves.find((c) => c.task === group);
    if (text && !inside.length && !group.toLowerCase().includes(text)) return [];
    const tasks = new Set(inside.map((r) => r.curve.task)).size, worse = inside.filter((r) => r.curve.drops.length).length;
    return [{ group, curve: own, count: tasks, worse }, ...(open.has(group) || text ? inside : [])];
  });
  return [...wanted.filter((r) => !members.has(r.curve.task)), ...folded];
}

/** -1 to 1: the change from the point before in yardsticks, over STRONG; 0 within NOISE. null: not known. */
function evidence(curve, i) {
  if (i === 0 || curve.marks[i] === "~") return null;
  const [a, b, ea, eb] = [curve.value[i - 1], curve.value[i], curve.stderr[i - 1], curve.stderr[i]];
  const error = curve.yardstick[i] ?? (ea === null || eb === null ? null : Math.hypot(ea, eb)); // of the first checkpoints
  if (a === null || error === null) return null;
  const change = (curve.up ? 1 : -1) * (b - a);
  if (!error) return Math.sign(change);
  return Math.abs(change) < NOISE * error ? 0 : Math.max(-1, Math.min(1, change / error / STRONG));
}

function inRange(curve, i) {
  const [low, high] = curve.range ??= ((values) => [Math.min(...values), Math.max(...values)])(curve.value.filter((v) => v !== null));
  return high > low ? (curve.up ? 1 : -1) * (2 * (curve.value[i] - low) / (high - low) - 1) : 0;
}

const shade = (strength) => (strength === null ? "none" : `${strength < 0 ? "down" : "up"}-${Math.round(Math.abs(strength) * 4)}`);

function cellDetail(training, curve, i) {
  const point = training.points[curve.at[i]], before = i > 0 ? training.points[curve.at[i - 1]] : null;
  const error = curve.stderr[i] === null ? "" : ` ± ${score(curve.stderr[i])}`;
  const change = i > 0 && curve.value[i - 1] !== null ? `; ${signed(curve.value[i] - curve.value[i - 1])} from ${before.label}` : "";
  const known = curve.yardstick[i] === null || curve.mean[i] === null ? "" : `, ${signed(curve.value[i] - curve.mean[i])} from the mean before, standard error of a difference ${score(curve.yardstick[i])}`;
  const worse = curve.drops.filter((d) => d.at === i || d.since === i).map((d) => el("strong", { class: "trouble", text: `; ${d.words}` }));
  return el("p", {}, said(curve.task, "said strong"), ` ${curve.measure} at `, said(point.label), `: ${score(curve.value[i])}${error}${change}${known}`, worse,
    documentsOf(curve, i) ? `; ${documentsOf(curve, i).toLocaleString("en")} documents` : "", ". ",
    DATA.mark ? el("a", { href: address.evaluation(point.evaluation_id), text: "its evaluation" }) : command(`evalspan report ${quoted(point.evaluation_id)}`), " ",
    !before ? null : DATA.mark ? el("a", { href: `${address.compare([before.evaluation_id, point.evaluation_id])}#part=${curve.measure === "mean" ? "changes" : "samples"}&task=${encodeURIComponent(curve.task)}`, text: `what flipped since ${before.label}` }) : command(`evalspan compare ${quoted(before.evaluation_id)} ${quoted(point.evaluation_id)}`));
}

const documentsOf = (curve, i) => (Array.isArray(curve.documents) ? curve.documents[i] : curve.documents);

function checkpointsPart() {
  const rows = DATA.trainings.flatMap((t) => t.points.map((point) => ({ training: t, point })));
  const priced = rows.some((r) => r.point.cost !== null), several = DATA.trainings.length > 1;
  const { bar, column } = boxes(rows.map((r) => r.point.evaluation_id));
  const columns = [column((r) => r.point.evaluation_id),
    ...(several ? [{ name: "training", of: (r) => r.training.name }, { name: "suite", of: (r) => r.training.suite }] : []), { name: "checkpoint", of: (r) => r.point.step ?? r.point.label, show: (r) => link(address.evaluation(r.point.evaluation_id), said(r.point.label)) },
    { name: "state", of: (r) => r.point.status, show: (r) => el("span", { class: `state ${r.point.status}` }, said(r.point.status)) }, { name: "accepted", of: (r) => r.point.accepted_at, show: (r) => when(r.point.accepted_at) },
    { name: "makespan", of: (r) => r.point.makespan_seconds, show: (r) => seconds(r.point.makespan_seconds), right: true }, { name: `${slotOf(rows.map((r) => r.point))} time`, of: (r) => r.point.gpu_seconds, show: (r) => seconds(r.point.gpu_seconds), right: true },
    ...(priced ? [{ name: "cost", of: (r) => r.point.cost, show: (r) => figure(r.point.cost), right: true }] : []),
  ];
  const gpu = rows.reduce((sum, r) => sum + (r.point.gpu_seconds ?? 0), 0), cost = rows.reduce((sum, r) => sum + (r.point.cost ?? 0), 0);
  return section("checkpoints", "Checkpoints", `${rows.length} evaluations, ${seconds(gpu)} of ${slotOf(rows.map((r) => r.point))}s${priced ? `, ${figure(cost)} in all` : ""}.`, el("div", { class: "tools" }, bar), table(columns, rows, { label: "checkpoints", key: "sort", order: several ? null : [3, false] }));
}
