// One evaluation: how it stands and what to type, its scores beside those of the checkpoint before, and where the time went.

if (DATA.kind === "evaluation") {
  PARTS.push({ id: "state", name: "State", make: statePart }, { id: "scores", name: "Scores", make: scoresPart }, { id: "summary", name: "Summary", make: summaryPart }, { id: "time", name: "Time", make: timePart });
  addEventListener("keydown", (event) => {
    if (event.target.closest?.("input, select, textarea") || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "e" || event.key === "l") document.querySelector(`.beside [data-key="${event.key}"]`)?.click();
  });
}

const CAUSES = { infer: "infer", imports: "import", load: "load", warm: "warm-up", dump: "dump", wait: "wait", other: "other: start, end, lost" };
const STAGES = { build: "build requests", staging: "staging", queue_wait: "queue wait, the longest", load: "import + load, mean of the trials", inference: "inference", metric_tail: "scores after the last response" };

/** Bars of seconds beside each other. `rows`: [name, seconds, note, colour]. */
function bars(rows, label, none = "None.") {
  if (!rows.length) return el("p", { class: "note", text: none });
  const most = Math.max(...rows.map((r) => r[1]), 1e-9);
  return el("table", { class: "bars", "aria-label": label }, el("tbody", {}, rows.map(([name, value, note, tint]) =>
    el("tr", {}, el("th", { scope: "row" }, said(name)), el("td", { class: "bar" }, el("span", { style: { width: `${Math.max(0, 100 * value / most)}%`, background: tint ?? "var(--line-0)" } })),
      el("td", { class: "right", text: seconds(value) }), el("td", { class: "soft", text: note ?? "" })))));
}

const MOST_NAMED = 6; // scores that the head names

const spanName = () => (DATA.report.status === "running" ? "so far" : DATA.halted ? "until it stopped" : "makespan");

function statePart() {
  const [word, text] = DATA.head, a = DATA.report, t = DATA.training;
  const failed = a.entries.filter((e) => e.status === "failed");
  const others = (t?.standing?.clauses ?? []).filter((c) => String(c.compared) !== String(t.against?.compared));
  return el("section", { id: "state", class: `head ${word}`, "aria-label": "state" },
    el("p", { class: "big" }, said(text)),
    el("p", {}, said(a.step === null ? a.checkpoint : `step ${a.step}`, "said strong"), ", ", said(a.mode === "exact" ? a.suite : `${a.suite}, ${a.mode} mode`), `, ${DATA.report.entries.filter((e) => e.status === "scored").length} of ${a.entries.length} tasks scored, `,
      `${spanName()} ${seconds(a.makespan_seconds)}, ${DATA.slot} time ${seconds(a.gpu_seconds)}`),
    DATA.waits.length ? el("p", {}, "It waits: ", said(DATA.waits.join("; "))) : null,
    t?.against ? clausesOf({ clauses: [t.against] }) : null,
    others.length ? [el("p", {}, "Its training:"), clausesOf({ clauses: others })] : null,
    word === "failed" ? el("p", {}, "Failed: ", said(firstOf(failed.map((e) => e.name), MOST_NAMED)), ". ", el("a", { href: "#part=failures", text: "why" })) : null,
    el("p", {}, failed.length ? command(`evalspan logs ${quoted(a.evaluation_id)}`) : null, commandFor(a.evaluation_id, word, text), word === "running" ? command(`evalspan watch ${quoted(a.evaluation_id)}`) : null), t ? besidePart(t) : null);
}

/** Links to the training and to its checkpoints beside this one, which the keys e and l open. */
function besidePart(t) {
  const beside = (point, key, name) => (point ? el("a", { href: address.evaluation(point[0]), "data-key": key, "aria-keyshortcuts": key }, `${name} (${key}): `, said(stepOf(point[1]))) : el("span", { class: "soft", text: `no ${name} checkpoint` }));
  if (!DATA.mark) return null; // a file has no other pages
  return el("nav", { class: "beside", "aria-label": "checkpoints of this training" }, el("a", { href: address.training(t.folder, t.suite) }, "training ", said(t.folder.split("/").slice(-2).join("/"))),
    beside(t.points[t.at - 1], "e", "earlier"), beside(t.points[t.at + 1], "l", "later"));
}

function summaryPart() {
  const a = DATA.report, rows = [];
  if (a.makespan_seconds !== null) rows.push([spanName(), a.makespan_seconds, a.ratio ? `${a.ratio.toFixed(2)} x the lower bound` : ""]);
  if (a.lower_bound_seconds) rows.push(["lower bound", a.lower_bound_seconds, "from the seconds of this run", "var(--line-2)"]);
  if (a.predicted_makespan_seconds) rows.push(["predicted", a.predicted_makespan_seconds, "by the priors, when the plan was made", "var(--line-3)"]);
  const facts = [["checkpoint", a.checkpoint], ["accepted", when(a.accepted_at)],
    [`${DATA.slot} time`, `${seconds(a.gpu_seconds)}, ${share(a.gpu_busy_fraction)} inference${DATA.cost === null ? "" : `; cost ${figure(DATA.cost)}`}`],
    ["weights staged", `${bytes(a.staged_bytes)}, of these ${bytes(a.storage_bytes)} read from storage`],
    a.tokens?.computed ? ["tokens", figure(a.tokens.computed)] : null, a.waited_seconds ? ["waited for a free GPU", seconds(a.waited_seconds)] : null,
    a.limited_seconds ? ["kept out by a limit on jobs", seconds(a.limited_seconds)] : null, a.paused_seconds ? ["paused", seconds(a.paused_seconds)] : null].filter(Boolean);
  return section("summary", "Summary", null, bars(rows, "makespan beside its bound and the prediction"), el("dl", {}, facts.map(([name, value, look]) => [el("dt", { text: name }), el("dd", {}, said(value, look))])),
    command(`evalspan report ${quoted(a.evaluation_id)} --verbose`));
}

const signed = (value) => `${value >= 0 ? "+" : "−"}${score(Math.abs(value))}`;

/** Estimates and verdicts of a screen, which are no scores. */
function screenPart({ reference, max_drop: drop, tasks }) {
  const asked = (r) => `${r.asked.toLocaleString("en")} of ${r.documents.toLocaleString("en")}`;
  const reach = (r) => `${score(r.estimate)} ± ${score(Math.max(r.high - r.estimate, r.estimate - r.low))}`;
  const answer = (r) => (r.verdict === "open" ? "open: lower, perhaps by chance" : `${r.verdict} by ${drop}`);
  const columns = [{ name: "task", of: (r) => r.task, show: (r) => el("span", {}, breaking(said(r.task)), el("small", { class: "narrow" }, asked(r))) }, { name: "metric", of: (r) => said(r.metric.replace(/,none$/, "")), wide: true },
    { name: "estimate", of: (r) => r.estimate, show: reach, right: true }, { name: "reference", of: (r) => r.reference, show: (r) => score(r.reference), right: true, wide: true },
    { name: "documents asked", of: (r) => r.asked, show: asked, right: true, wide: true }, { name: "verdict", of: (r) => ({ worse: 0, open: 1 })[r.verdict] ?? 2, show: (r) => el("span", { class: r.verdict === "worse" ? "trouble" : "soft" }, answer(r)) }];
  return section("scores", "Screen", `Is a score lower by more than ${drop} than that of ${reference}? Estimate: of the score over all documents, from those asked, ± the wider half of its 95 % interval. It is no score, and is not compared with one.`, table(columns, tasks, { label: "screen", key: "scores" }));
}

function scoresPart() {
  if (DATA.screen) return screenPart(DATA.screen);
  const t = DATA.training, before = t?.before, last = (r) => changeOf(r);
  const nameOf = (r) => `${r.task}/${r.measure}`, changeOf = (r) => t?.changes[nameOf(r)];
  const withSamples = new Set((DATA.samples ?? []).map((s) => s.task));
  const metricOf = (r) => `${r.measure} ${r.higher_is_better ? "↑" : "↓"}`;
  const named = (r) => (withSamples.has(r.task) ? el("a", { href: `#part=samples&task=${encodeURIComponent(r.task)}`, title: "its samples" }, breaking(said(r.task))) : breaking(said(r.task)));
  const task = (r) => el("span", {}, named(r), el("small", { class: "narrow" }, said(metricOf(r))));
  const columns = [
    { name: "task", of: (r) => r.task, show: task }, { name: "metric", wide: true, of: (r) => r.measure, show: (r) => said(metricOf(r)) },
    { name: "value", of: (r) => r.value, show: (r) => el("span", {}, score(r.value), r.stderr === null ? null : el("span", { class: "wide", text: ` ± ${score(r.stderr)}` })), right: true },
    ...(before ? [{ name: `change from ${before[1]}`, of: (r) => last(r)?.change ?? null, show: (r) => changeText(last(r)), right: true }, { name: "verdict", of: (r) => ({ worse: 0, better: 1, "no evidence": 2 })[last(r)?.verdict] ?? 3, show: (r) => verdictText(last(r)) }] : []),
    ...(before ? [{ name: `since ${t.first}`, wide: true, of: (r) => r.value - (t.scores[nameOf(r)]?.find((v) => v !== null) ?? r.value), show: (r) => sparkline([[...(t.scores[nameOf(r)] ?? []), r.value]], `from ${score(t.scores[nameOf(r)]?.find((v) => v !== null))} to ${score(r.value)}`) }] : []),
    { name: "n", of: (r) => r.documents, show: (r) => r.documents?.toLocaleString("en"), right: true, wide: true }, { name: "n-shot", of: (r) => r.n_shot, right: true, wide: true }, { name: "version", of: (r) => r.version, right: true, wide: true },
  ];
  const without = DATA.report.entries.filter((e) => e.status !== "scored");
  const list = without.length ? el("ul", {}, without.map(({ name, status: state, error }) => el("li", {}, said(name, "said strong"), `: ${DATA.halted && state !== "failed" ? "was " : ""}${state}`, error ? ": " : "", said(error)))) : null;
  let text = sought("score");
  const wanted = () => DATA.scores.filter((r) => nameOf(r).toLowerCase().includes(text));
  const shown = table(columns, wanted(), { label: "scores", key: "scores", none: "No score yet." });
  return section("scores", "Scores", "↑ higher is better, ↓ lower is better. Value: ± its standard error. Change: ± the wider half of its two-sided 95 % interval.", list, DATA.scores.length > 20 ? el("div", { class: "tools" }, search("find a task", (v) => { text = v; shown.show(wanted()); }, "score")) : null, shown);
}

const changeText = (c) => (c?.change == null ? "–" : `${signed(c.change)}${c.reach === null ? "" : ` ± ${score(c.reach)}`}`);
const verdictText = (c) => (c?.verdict === "no evidence" ? el("span", { class: "verdict soft", title: c.words, "aria-label": c.words, text: "·" }) : c?.words ? el("span", { class: `verdict ${{ worse: "trouble", better: "good" }[c.verdict] ?? "soft"}` }, said(c.words)) : "");

function timePart() {
  const { gpus, stages: known } = DATA.report, sum = (values) => values.reduce((a, b) => a + b, 0);
  const all = Object.entries(CAUSES).map(([key, name], i) => [name, sum(gpus.map((g) => g[key] * Math.max(1, g.gpus))), i]), total = sum(all.map((r) => r[1]));
  const causes = all.filter((r) => r[1] > 0).map(([name, value, i]) => [name, value, share(value / total), `var(--line-${i})`]);
  const stages = Object.entries(STAGES).filter(([key]) => typeof known[key] === "number").map(([key, name]) => [name, Math.max(0, known[key]), key === "queue_wait" ? known.waited_for : ""]);
  return section("time", "Where the time went", "From the trigger to the score; stages overlap.", el("h3", { text: "Stages" }), bars(stages, "seconds of each stage"),
    el("h3", { text: `${DATA.slot} seconds by cause` }), bars(causes, `${DATA.slot} seconds by cause`, "No trial has ended yet."), el("h3", { text: "Predicted and actual seconds of tasks" }), predictions());
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
