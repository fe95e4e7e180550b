// Lanes over time: trials with their shards, jobs without GPUs, the lower bound and the prediction as lines.

if (DATA.kind === "evaluation") PARTS.push({ id: "lanes", name: "Lanes", make: lanesPart }, { id: "failures", name: "Failures", make: failuresPart });

const MOST_BOXES = 20_000; // shards that are drawn apart; of more, neighbours of one task are one box
const TICK_PX = 110; // between two times of the axis, at least
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400]; // seconds between them

function lanesPart() {
  const { gpus, accepted_at } = DATA.report;
  if (!gpus.length && !DATA.jobs.length) return section("lanes", "Lanes", "No trial has ended yet.");
  const hint = "Point at a bar to read of it; zoom, then scroll.", status = el("p", { class: "note hint", role: "status", text: hint });
  const end = 1.02 * Math.max(1, DATA.report.makespan_seconds ?? 0, ...gpus.map((g) => g.started_at - accepted_at + g.held), ...DATA.jobs.map((j) => j[2] + j[3]));
  const rows = el("div"), marks = el("div", { class: "marks" }), all = el("div", { class: "lanes-all" }, marks, rows);
  const place = el("div", { class: "lanes", tabindex: 0, role: "region", "aria-label": "lanes over time; the tables hold the same figures", onpointerover: (event) => { status.textContent = event.target.title || hint; } }, all);
  const at = (seconds) => `${(100 * seconds) / end}%`;
  const tick = () => {
    const step = STEPS.find((each) => each >= (end * TICK_PX) / marks.clientWidth) ?? 86400 * Math.ceil((end * TICK_PX) / marks.clientWidth / 86400);
    const known = [["bound", DATA.report.lower_bound_seconds], ["predicted", DATA.report.predicted_makespan_seconds]].filter(([, value]) => value > 0).toSorted((a, b) => a[1] - b[1]);
    const lines = known.map(([name, value], i) => el("span", { class: "bound", style: { left: at(value) } }, el("span", { text: name, style: i < known.length - 1 ? { right: "0" } : { left: "0" } })));
    marks.replaceChildren(...Array.from({ length: Math.ceil(end / step) }, (_, i) => el("span", { style: { left: at(i * step) } }, el("span", { text: seconds(i * step) }))), ...lines);
  };
  const zoom = choice("zoom", [[1, "all of it"], [4, "4 times"], [16, "16 times"], [64, "64 times"]], (v) => { all.style.width = `${100 * v}%`; tick(); });
  const tasks = el("div", { class: "legend", tabindex: 0, role: "group", "aria-label": "tasks by colour" }, DATA.shards.tasks.slice(0, 24).map((task, i) => el("span", {}, el("span", { class: "swatch", style: { background: `var(--line-${i % SERIES})` } }), said(task))));
  whenSeen(place, () => { rows.replaceChildren(...laneRows(at)); tick(); });
  return section("lanes", "Lanes", "A row for each trial, and rows for jobs without GPUs. Faint: a trial holds its GPUs; grey: import, load, warm-up, and jobs; colours: shards by task.", el("div", { class: "tools" }, zoom), status, place, tasks, longest());
}

/** A row per trial, then rows of jobs. `at`: seconds -> part of the width. */
function laneRows(at) {
  const { gpus, accepted_at } = DATA.report, s = DATA.shards, of = new Map(gpus.map((_, i) => [i, []]));
  const box = (begin, length, title, background) => el("span", { title, style: { left: at(begin), width: at(length), background } });
  const row = (name, boxes) => el("div", { class: "lane" }, el("span", { class: "lane-name cut", title: name }, said(name)), el("div", { class: "track" }, boxes));
  s.lane.forEach((lane, i) => {
    const last = of.get(lane)?.at(-1);
    if (s.task.length > MOST_BOXES && last?.task === s.task[i]) [last.to, last.count, last.predicted] = [s.begin[i] + s.seconds[i], last.count + 1, last.predicted + s.predicted[i]];
    else of.get(lane)?.push({ task: s.task[i], name: s.name[i], from: s.begin[i], to: s.begin[i] + s.seconds[i], predicted: s.predicted[i], count: 1 });
  });
  const trials = gpus.map((g, i) => {
    const begin = g.started_at - accepted_at, before = g.imports + g.load + g.warm;
    const shards = of.get(i).map((b) => box(b.from, b.to - b.from, `${s.tasks[b.task]} ${b.count > 1 ? `${b.count} shards from ${b.name}` : b.name}: ${seconds(b.to - b.from)}, predicted ${seconds(b.predicted)}; from ${seconds(b.from)}; ${g.trial} on ${g.node}`, `var(--line-${b.task % SERIES})`));
    return row(`${g.node} ${g.trial.split(".").at(-1)}`, [box(begin, g.held, `${g.trial} on ${g.node}, ${g.gpus} × ${g.device || "GPU"}: held ${seconds(g.held)}, ${g.shards} shards, ended ${g.ended}`, "var(--held)"), box(begin, Math.min(before, g.held), `${g.trial}: import, load, warm-up, ${seconds(before)}`, "var(--load)"), shards]);
  });
  const others = [];
  for (const [what, name, begin, length, at] of DATA.jobs) {
    const metric = what === "score" || what === "execute";
    (others[at] ??= { name: metric ? "metrics" : what, boxes: [] }).boxes.push(box(begin, length, `${what} ${name}: ${seconds(length)}, from ${seconds(begin)}`, metric ? "var(--line-5)" : "var(--load)"));
  }
  return [...trials, ...others.filter(Boolean).map((r) => row(r.name, r.boxes))];
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
