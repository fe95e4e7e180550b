// One evaluation in figures: makespan against its bound, scores, GPU seconds by cause, nodes, failures.

if (DATA.kind === "evaluation") PARTS.push(
  { id: "summary", name: "Summary", make: summaryPart }, { id: "scores", name: "Scores", make: scoresPart }, { id: "time", name: "Time", make: timePart });

const CAUSES = { infer: "inference", imports: "import", load: "load", warm: "warm-up", dump: "dump", wait: "wait", other: "start, end, lost" };
const STAGES = { build: "build requests", staging: "stage weights", queue_wait: "longest wait in the queue", load: "import, load, warm-up (mean)", inference: "inference", metric_tail: "metrics after the last response" };

const OPEN_OR_DONE = new Set(["running", "done"]); // statuses without trouble

/** What the trials held: a report says the same words. */
const held = () => (DATA.report.gpus.length && DATA.report.gpus.every((g) => g.device === "cpu") ? "slot" : "GPU");

/** Bars of seconds beside each other. `rows`: [name, seconds, note, colour]. */
function bars(rows, label, none = "None.") {
  if (!rows.length) return el("p", { class: "note", text: none });
  const most = Math.max(...rows.map((r) => r[1]), 1e-9);
  return el("table", { class: "bars", "aria-label": label }, el("tbody", {}, rows.map(([name, value, note, tint]) =>
    el("tr", {}, el("th", { scope: "row" }, said(name)), el("td", { class: "bar" }, el("span", { style: { width: `${Math.max(0, 100 * value / most)}%`, background: tint ?? "var(--line-0)" } })),
      el("td", { class: "right", text: seconds(value) }), el("td", { class: "soft", text: note ?? "" })))));
}

function summaryPart() {
  const a = DATA.report, rows = [];
  if (a.makespan_seconds !== null) rows.push([a.status === "running" ? "so far" : DATA.halted ? "until it stopped" : "makespan", a.makespan_seconds, a.ratio ? `${a.ratio.toFixed(3)} × the lower bound` : ""]);
  if (a.lower_bound_seconds) rows.push(["lower bound", a.lower_bound_seconds, "from the seconds of this run", "var(--line-2)"]);
  if (a.predicted_makespan_seconds) rows.push(["predicted", a.predicted_makespan_seconds, "by the plan", "var(--line-3)"]);
  const facts = [["checkpoint", a.checkpoint], ["suite", a.mode === "exact" ? a.suite : `${a.suite}, ${a.mode} mode`], ["status", DATA.halted || a.status, OPEN_OR_DONE.has(a.status) ? "said" : "said trouble"], ["accepted", when(a.accepted_at)],
    [`${held()} time`, `${seconds(a.gpu_seconds)}, ${share(a.gpu_busy_fraction)} in inference${DATA.cost === null ? "" : `; cost ${figure(DATA.cost)}`}`],
    ["weights staged", `${bytes(a.staged_bytes)}, of these ${bytes(a.storage_bytes)} read from storage`],
    a.tokens?.computed ? ["tokens", figure(a.tokens.computed)] : null, a.waited_seconds ? ["without GPUs", seconds(a.waited_seconds)] : null,
    a.limited_seconds ? ["kept out by a limit on jobs", seconds(a.limited_seconds)] : null, a.paused_seconds ? ["paused", seconds(a.paused_seconds)] : null].filter(Boolean);
  return section("summary", "Summary", null, el("dl", {}, facts.map(([name, value, look]) => [el("dt", { text: name }), el("dd", {}, said(value, look))])),
    bars(rows, "makespan beside its bound and the prediction"), command(`evalspan report ${quoted(a.evaluation_id)} --verbose`),
    a.entries.some((e) => e.status === "failed") || a.status === "given up" ? command(`evalspan retry ${quoted(a.evaluation_id)}`) : null);
}

function scoresPart() {
  const columns = [
    { name: "task", of: (r) => r[0] }, { name: "measure", of: (r) => r[1], show: (r) => `${r[1]}${r[4] ? "" : " (lower is better)"}` },
    { name: "value", of: (r) => r[2], show: (r) => score(r[2]), right: true }, { name: "standard error", of: (r) => r[3], show: (r) => score(r[3]), right: true },
    { name: "documents", of: (r) => r[5], show: (r) => r[5]?.toLocaleString("en"), right: true }, { name: "shots", of: (r) => r[6], right: true }, { name: "version", of: (r) => r[7], right: true },
  ];
  const without = DATA.report.entries.filter((e) => e.status !== "scored");
  const list = without.length ? el("ul", {}, without.map(({ name, status: state, error }) => el("li", {}, said(name, "said strong"), `: ${DATA.halted && state !== "failed" ? "was " : ""}${state}`, error ? ": " : "", said(error)))) : null;
  return section("scores", "Scores", null, list, table(columns, DATA.scores, { label: "scores" }));
}

function timePart() {
  const { gpus, stages: known } = DATA.report, sum = (values) => values.reduce((a, b) => a + b, 0);
  const all = Object.entries(CAUSES).map(([key, name], i) => [name, sum(gpus.map((g) => g[key] * Math.max(1, g.gpus))), i]), total = sum(all.map((r) => r[1]));
  const causes = all.filter((r) => r[1] > 0).map(([name, value, i]) => [name, value, share(value / total), `var(--line-${i})`]);
  const stages = Object.entries(STAGES).filter(([key]) => typeof known[key] === "number").map(([key, name]) => [name, Math.max(0, known[key]), key === "queue_wait" ? known.waited_for : ""]);
  return section("time", "Where the time went", "From the trigger to the score; stages overlap.", el("h3", { text: "Stages" }), bars(stages, "seconds of each stage"),
    el("h3", { text: `${held()} seconds by cause` }), bars(causes, `${held()} seconds by cause`, "No trial has ended yet."), el("h3", { text: "Predicted and actual seconds of tasks" }), predictions());
}

/** Per task: sums over its shards. */
function predictions() {
  const s = DATA.shards, rows = s.tasks.map((task) => ({ task, shards: 0, actual: 0, predicted: 0, known: true }));
  s.task.forEach((t, i) => {
    rows[t].shards += 1;
    rows[t].actual += s.seconds[i];
    if (s.predicted[i] === null) rows[t].known = false;
    else rows[t].predicted += s.predicted[i];
  });
  const times = (r) => (r.known && r.predicted ? r.actual / r.predicted : null);
  return table([{ name: "task", of: (r) => r.task }, { name: "shards", of: (r) => r.shards, right: true }, { name: "seconds", of: (r) => r.actual, show: (r) => seconds(r.actual), right: true },
    { name: "predicted", of: (r) => (r.known ? r.predicted : null), show: (r) => (r.known ? seconds(r.predicted) : "–"), right: true },
    { name: "actual / predicted", of: times, show: (r) => figure(times(r)), right: true }], rows, { label: "predicted and actual seconds", order: [2, false] });
}
