// Lanes over time on a canvas: trials with their shards, jobs without GPUs, the lower bound and the prediction as lines.

if (DATA.kind === "evaluation") PARTS.push({ id: "lanes", name: "Lanes", make: lanesPart }, { id: "failures", name: "Failures", make: failuresPart });

const ROW = 16, HEAD = 22, FOOT = 16, NAMES = 170; // pixels: a row, the axis, the names of lines, the names of rows
const MOST_HEIGHT = 560; // pixels of the canvas; more rows scroll
const PAPER = 800; // pixels of all rows on paper

class Lanes {
  constructor(canvas, status) {
    [this.canvas, this.status, this.lanes] = [canvas, status, lanesOf(DATA.report)];
    this.rows = [...this.lanes.map(([name, node], i) => ({ name, node, lane: i })), ...jobRows()];
    const shards = DATA.shards;
    this.byLane = new Map();
    shards.lane.forEach((lane, i) => { if (!this.byLane.has(lane)) this.byLane.set(lane, []); this.byLane.get(lane).push(i); });
    this.end = Math.max(1, DATA.report.makespan_seconds ?? 0, ...this.lanes.map((l) => l[4] + l[5]), ...DATA.jobs.map((j) => j[2] + j[3]));
    [this.from, this.to, this.top] = [0, this.end * 1.02, 0];
    this.hue = new Map(shards.tasks.map((task, i) => [i, i % SERIES]));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => { this.drag = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { this.drag = null; });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.redraw = () => this.draw();
  }

  get width() { return this.canvas.clientWidth; }
  get names() { return Math.min(NAMES, this.width / 3); }
  x(at) { return this.names + (at - this.from) / (this.to - this.from) * (this.width - this.names); }
  at(x) { return this.from + (x - this.names) / (this.width - this.names) * (this.to - this.from); }
  get shown() { return Math.floor((this.height - HEAD - FOOT) / this.step); }

  draw() {
    const ratio = devicePixelRatio, pen = this.canvas.getContext("2d");
    this.step = PRINTING ? Math.max(2, Math.min(ROW, PAPER / this.rows.length)) : ROW;
    this.height = Math.min(PRINTING ? Infinity : MOST_HEIGHT, HEAD + this.step * this.rows.length + FOOT);
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = "11px system-ui";
    pen.textBaseline = "middle";
    this.ink = Object.fromEntries(["ink", "soft", "rule", "paper", "bad", "held", "load"].map((name) => [name, colour(`--${name}`)]));
    this.lines = Array.from({ length: SERIES }, (_, i) => line(i));
    this.axis(pen);
    pen.save();
    pen.beginPath();
    pen.rect(0, HEAD, this.width, this.height - HEAD - FOOT);
    pen.clip();
    (PRINTING ? this.rows : this.rows.slice(this.top, this.top + this.shown + 1)).forEach((row, i) => this.row(pen, row, HEAD + i * this.step));
    pen.restore();
    const { lower_bound_seconds: bound, predicted_makespan_seconds: predicted } = DATA.report;
    this.rule(pen, bound, "bound", bound <= predicted);
    this.rule(pen, predicted, "predicted", predicted < bound);
  }

  axis(pen) {
    const step = niceStep((this.to - this.from) / Math.max(2, this.width / 110));
    pen.textAlign = "center";
    let free = 0; // pixels from which on no name of the axis stands yet
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      pen.fillStyle = this.ink.rule;
      pen.fillRect(this.x(at), HEAD, 1, this.height);
      pen.fillStyle = this.ink.soft;
      const half = pen.measureText(seconds(at)).width / 2, middle = Math.min(this.x(at), this.width - half);
      if (middle - half < free) continue;
      pen.fillText(seconds(at), middle, HEAD / 2);
      free = middle + half + 6;
    }
    pen.textAlign = "left";
  }

  rule(pen, at, name, before) {
    if (!at || at < this.from || at > this.to) return;
    pen.strokeStyle = this.ink.ink;
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(this.x(at), HEAD);
    pen.lineTo(this.x(at), this.height);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = this.ink.ink;
    const size = pen.measureText(name).width, left = this.x(at) + (before ? -size - 3 : 3);
    pen.fillText(name, Math.max(0, Math.min(left, this.width - size)), this.height - FOOT / 2);
  }

  row(pen, row, y) {
    if (row.lane !== undefined) {
      const [, , , , begin, held, before] = this.lanes[row.lane];
      this.box(pen, begin, held, y, this.ink.held);
      this.box(pen, begin, Math.min(before, held), y, this.ink.load);
      for (const i of this.byLane.get(row.lane) ?? []) this.box(pen, DATA.shards.begin[i], DATA.shards.seconds[i], y, this.lines[this.hue.get(DATA.shards.task[i])], true);
    } else for (const job of row.jobs) this.box(pen, job[2], job[3], y, job[0] === "execute" || job[0] === "score" ? this.lines[5] : this.ink.load, true);
    if (this.step < 9) return; // no name can be read
    pen.fillStyle = this.ink.paper;
    pen.fillRect(0, y, this.names, ROW);
    pen.fillStyle = this.ink.ink;
    pen.fillText(cut(pen, row.lane === undefined ? row.name : `${row.node} ${row.name.split(".").at(-1)}`, this.names - 6), 2, y + this.step / 2);
  }

  box(pen, begin, length, y, fill, edge = false) {
    const left = Math.max(this.names, this.x(begin)), right = Math.min(this.width, this.x(begin + length));
    if (right <= left) return;
    pen.fillStyle = fill;
    pen.fillRect(left, y + this.step / 8, Math.max(0.5, right - left - (edge && right - left > 3 ? 1 : 0)), 0.75 * this.step);
  }

  /** What lies below a place of the canvas, as a sentence; "" for nothing. */
  found(x, y) {
    const row = this.rows[this.top + Math.floor((y - HEAD) / this.step)], at = this.at(x);
    if (!row || y < HEAD || x < this.names) return row && y >= HEAD ? row.name : "";
    if (row.lane === undefined) {
      const job = row.jobs.find((j) => j[2] <= at && at <= j[2] + j[3]);
      return job ? `${job[0]} ${job[1]}: ${seconds(job[3])}, from ${seconds(job[2])}` : "";
    }
    const s = DATA.shards, i = (this.byLane.get(row.lane) ?? []).find((k) => s.begin[k] <= at && at <= s.begin[k] + s.seconds[k]);
    const [trial, node, gpus, device, begin, held, before, count, ended] = this.lanes[row.lane];
    if (i !== undefined) return `${s.tasks[s.task[i]]} ${s.name[i]}: ${seconds(s.seconds[i])}, predicted ${seconds(s.predicted[i])}; from ${seconds(s.begin[i])}; ${trial} on ${node}`;
    if (at < begin || at > begin + held) return "";
    return at < begin + before ? `${trial}: import, load, warm-up, ${seconds(before)}` : `${trial} on ${node}, ${gpus} × ${device || "GPU"}: held ${seconds(held)}, ${count} shards, ended ${ended}`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    if (this.drag !== null && this.drag !== undefined) {
      this.move((this.drag - event.clientX) / (this.width - this.names));
      this.drag = event.clientX;
    }
    this.status.replaceChildren(said(this.found(event.clientX - box.left, event.clientY - box.top) || HINT));
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey) return this.scroll(Math.sign(event.deltaY || event.deltaX) * 3);
    this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.at(event.clientX - this.canvas.getBoundingClientRect().left));
  }

  key(event) {
    const does = { ArrowLeft: () => this.move(-0.1), ArrowRight: () => this.move(0.1), ArrowUp: () => this.scroll(-1), ArrowDown: () => this.scroll(1), PageUp: () => this.scroll(-this.shown), PageDown: () => this.scroll(this.shown),
      "+": () => this.zoom(0.8), "-": () => this.zoom(1.25), "0": () => { [this.from, this.to] = [0, this.end * 1.02]; this.draw(); } }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }

  zoom(by, around = (this.from + this.to) / 2) {
    [this.from, this.to] = [around + (this.from - around) * by, around + (this.to - around) * by];
    this.draw();
  }

  move(part) {
    const by = part * (this.to - this.from);
    [this.from, this.to] = [this.from + by, this.to + by];
    this.draw();
  }

  scroll(rows) {
    this.top = Math.max(0, Math.min(this.rows.length - this.shown, this.top + rows));
    this.draw();
  }
}

/** Trials as [name, node, GPUs, device, begin, seconds held, of these before the first shard, shards, end]. */
const lanesOf = ({ gpus, accepted_at }) => gpus.map((g) => [g.trial, g.node, g.gpus, g.device, g.started_at - accepted_at, g.held, g.imports + g.load + g.warm, g.shards, g.ended]);

const HINT = "Point at a bar. Ctrl and wheel or + and −: zoom; drag or arrow keys: move; Shift and wheel: scroll the rows; 0: all of it.";

function jobRows() {
  const rows = [];
  for (const job of DATA.jobs) (rows[job[4]] ??= { name: job[0] === "score" || job[0] === "execute" ? "metrics" : job[0], jobs: [] }).jobs.push(job);
  return rows.filter(Boolean);
}

function niceStep(least) {
  return [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].find((step) => step >= least) ?? 86400 * Math.ceil(least / 86400);
}

function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let kept = text;
  while (kept.length > 4 && pen.measureText(`…${kept}`).width > width) kept = kept.slice(1);
  return `…${kept}`;
}

function lanesPart() {
  const { gpus, makespan_seconds } = DATA.report;
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": `${gpus.length} trials and ${DATA.jobs.length} jobs without GPUs over ${seconds(makespan_seconds)}; the tables below and above hold the same figures` });
  if (!gpus.length && !DATA.jobs.length) return section("lanes", "Lanes", "No trial has ended yet.");
  const status = el("p", { class: "note hint", role: "status" }, HINT);
  const tasks = el("div", { class: "legend", tabindex: 0, role: "group", "aria-label": "tasks by colour" }, DATA.shards.tasks.slice(0, 24).map((task, i) => el("span", {}, el("span", { class: "swatch", style: { background: `var(--line-${i % SERIES})` } }), said(task))));
  const made = section("lanes", "Lanes", "A row for each trial, and rows for jobs without GPUs. Faint: a trial holds its GPUs; grey: import, load, warm-up, and jobs; colours: shards by task.", status, el("div", { class: "canvas" }, canvas), tasks, longest());
  whenSeen(canvas, () => new Lanes(canvas, status).draw());
  return made;
}

/** The shards that took longest beyond their prediction. */
function longest() {
  const s = DATA.shards, over = (i) => (s.predicted[i] === null ? null : s.seconds[i] - s.predicted[i]);
  return el("details", {}, el("summary", { text: "Shards as a table" }), table([
    { name: "task", of: (i) => s.tasks[s.task[i]] }, { name: "shard", of: (i) => s.name[i] }, { name: "trial", of: (i) => DATA.report.gpus[s.lane[i]]?.trial ?? (DATA.report.status === "running" ? "runs still" : "not ended") },
    { name: "begin", of: (i) => s.begin[i], show: (i) => seconds(s.begin[i]), right: true }, { name: "seconds", of: (i) => s.seconds[i], show: (i) => seconds(s.seconds[i]), right: true },
    { name: "predicted", of: (i) => s.predicted[i], show: (i) => seconds(s.predicted[i]), right: true }, { name: "over", of: over, show: (i) => seconds(over(i)), right: true }],
    s.task.map((_, i) => i), { label: "shards", order: [6, false] }));
}

function failuresPart() {
  const all = DATA.notes, bad = all.filter((n) => n[3]);
  const columns = [{ name: "at", of: (r) => r[0], show: (r) => seconds(r[0]), right: true }, { name: "what", of: (r) => r[1] }, { name: "what happened", of: (r) => r[2], show: (r) => said(r[2], r[3] ? "said trouble" : "said") }];
  const list = table(columns, bad, { label: "failures and troubles", order: [0, true] });
  const logs = DATA.logs?.length ? el("div", {}, el("h3", { text: "Last lines of their logs" }), DATA.logs.map(([job, lines, isLog]) => el("details", {}, el("summary", {}, said(job)), el("pre", { tabindex: 0 }, said(lines)), isLog ? command(`evalspan logs ${quoted(DATA.report.evaluation_id)} ${quoted(job)}`) : null))) : null;
  const warnings = DATA.report.warnings.length ? el("ul", {}, DATA.report.warnings.map((text) => el("li", {}, said(text)))) : null;
  const unscored = Object.entries(DATA.unscored).map(([task, items]) => el("li", {}, said(task, "said strong"), `: ${Object.keys(items).length} items without a score, the first: `, said(Object.entries(items)[0]?.join(": "))));
  return section("failures", "Failures", bad.length || DATA.report.warnings.length ? null : "Nothing failed.", warnings, unscored.length ? el("ul", {}, unscored) : null,
    choice("show", [["bad", `troubles (${bad.length})`], ["all", `all events (${all.length})`]], (v) => list.show(v === "all" ? all : bad)), list, logs);
}
