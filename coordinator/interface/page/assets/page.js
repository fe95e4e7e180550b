// Puts the parts of the page together: the heading, the list of parts, and each part when it is near the view.

if (DATA.kind === "comparison") PARTS.unshift({ id: "changes", name: "What flipped", make: changesPart });

/** What flipped over all tasks, and how each score has changed; a task leads to its samples. */
function changesPart() {
  const last = (r) => r.verdicts.at(-1), known = new Set(DATA.samples.map((s) => s.task)), metric = (r) => r.metric.replace(",none", "");
  const net = (r) => (last(r).gained == null ? null : last(r).gained - last(r).lost);
  const whole = (n) => `${n < 0 ? "−" : "+"}${Math.abs(n).toLocaleString("en")}`;
  const one = (r) => ({ change: r.change, reach: last(r).reach ?? null, verdict: last(r).verdict, words: last(r).words });
  const columns = [{ name: "task", of: (r) => r.task, show: (r) => (known.has(r.task) ? el("a", { href: `#part=samples&task=${encodeURIComponent(r.task)}`, title: "its samples" }, breaking(said(r.task))) : breaking(said(r.task))) }, { name: "metric", of: metric, show: (r) => said(metric(r)) },
    { name: "gained", of: (r) => last(r).gained ?? null, show: (r) => (last(r).gained == null ? "–" : `+${last(r).gained}`), right: true }, { name: "lost", of: (r) => last(r).lost ?? null, show: (r) => (last(r).lost == null ? "–" : `−${last(r).lost}`), right: true },
    { name: "net", of: net, show: (r) => (net(r) === null ? "–" : whole(net(r))), right: true },
    { name: "change (two-sided 95 %)", of: (r) => r.change, show: (r) => changeText(one(r)), right: true }, { name: "p", of: (r) => last(r).adjusted ?? null, show: (r) => (last(r).adjusted == null ? "–" : last(r).adjusted.toFixed(4)), right: true },
    { name: "verdict", of: (r) => ({ worse: 0, better: 1, "no evidence": 2 })[last(r).verdict] ?? 3, show: (r) => verdictText(one(r)) },
    ...DATA.heads.map((head, i) => ({ name: head, of: (r) => r.values[i], show: (r) => `${score(r.values[i])}${r.stderrs[i] === null ? "" : ` ± ${score(r.stderrs[i])}`}${r.differs[i] ? "~" : ""}`, right: true }))];
  let [text, only] = [sought("score"), STATE.get("verdict") ?? "all"];
  const wanted = () => DATA.rows.filter((r) => `${r.task} ${metric(r)}`.toLowerCase().includes(text) && (only === "all" || last(r).verdict === only || (only === "flipped" && last(r).gained + last(r).lost > 0)));
  const list = table(columns, wanted(), { label: "changes", order: [4, true], key: "changes" }), draw = () => list.show(wanted());
  const first = [...new Map(DATA.rows.filter((r) => net(r) !== null && !r.leaves.length).toReversed().map((r) => [r.task, last(r)])).values()], sum = (name) => first.reduce((all, v) => all + v[name], 0);
  const [worse, better] = ["worse", "better"].map((verdict) => DATA.rows.filter((r) => last(r).verdict === verdict).length);
  return el("div", {}, el("section", { class: `head ${{ worse: "failed", better: "done" }[DATA.overall.at(-1).verdict] ?? ""}` }, el("p", { class: "big", text: DATA.overall.at(-1).words }), worse || better ? el("p", { text: `Alone, ${worse} score${worse === 1 ? " is" : "s are"} worse and ${better} better.` }) : null,
    first.length ? el("p", { text: `Of ${first.length} tasks with right and wrong answers: ${sum("gained").toLocaleString("en")} answers gained, ${sum("lost").toLocaleString("en")} lost, net ${whole(sum("gained") - sum("lost"))}.` }) : null,
    DATA.ids.map((id, i) => el("p", {}, said(DATA.heads[i], "said strong"), ": ", link(address.evaluation(id), said(id)))), command(`evalspan compare ${DATA.ids.map(quoted).join(" ")}`)),
  section("changes", "What flipped", `The last evaluation against the first, the largest loss first. ${DATA.verdicts} p: after this correction. "~": not comparable with the first.`,
    el("div", { class: "tools" }, search("find a task", (v) => { text = v; draw(); }, "score"), choice("show", [["all", "all scores"], ["worse", "worse"], ["better", "better"], ["flipped", "any answer flipped"]], (v) => { only = v; draw(); }, "verdict")), list));
}

function begin() {
  DATA.trainings?.forEach((training) => training.curves && complete(training)); // of the first page they have none
  const parts = PARTS.map((part) => ({ ...part, holder: el("div", { class: "part", id: `part-${part.id}` }) }));
  const nav = el("nav", { "aria-label": "parts of the page" }, el("strong", { text: "evalspan" }), parts.map((p) => el("a", { href: `#part=${p.id}`, text: p.name, onclick: (event) => { event.preventDefault(); remember("part", p.id); toPart(); } })),
    el("button", { type: "button", text: "light / dark", onclick: otherTheme }));
  const main = el("main", { id: "main" }, el("h1", {}, said(document.title)), DATA.note ? el("p", { class: "note" }, said(DATA.note)) : null, parts.map((p) => p.holder));
  document.body.append(el("a", { class: "skip", href: "#main", text: "to the content" }), nav, main);
  for (const part of parts) part.holder.append(part.make());
  if (DATA.made_at) main.append(el("footer", { class: "note", text: `Made ${when(DATA.made_at)} by evalspan ${DATA.version ?? ""}. Nothing in this page was loaded from elsewhere.` }));
}

/** To the part that the address names. */
const toPart = () => document.getElementById(`part-${STATE.get("part")}`)?.scrollIntoView();

/** A link of this page, or a colleague's address. */
function moved() {
  STATE = new URLSearchParams(location.hash.slice(1));
  drawAgain();
  toPart();
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

function otherTheme() {
  const to = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.theme = to; } catch {} // refused: the theme is this page's alone
  dress(to);
}

function dress(theme) {
  document.documentElement.dataset.theme = theme;
  recolour();
}

/** Charts keep the colours that they were drawn with. */
function recolour() {
  for (const drawn of document.querySelectorAll(".plot, .heat-box")) drawn.redraw?.();
}

/** Paper is white and does not scroll: what is printed is drawn whole, in light colours, with the logs of failures. */
function printed() {
  const { theme } = document.documentElement.dataset;
  const closed = document.querySelectorAll("#failures details:not([open])");
  const set = (printing, to) => {
    PRINTING = printing;
    for (const log of closed) log.open = printing;
    dress(to);
  };
  for (const waiting of document.querySelectorAll("[data-waits]")) waiting.drawNow?.();
  set(true, "light");
  addEventListener("afterprint", () => set(false, theme), { once: true });
}

function drawAgain() {
  document.querySelectorAll("nav, main, .skip").forEach((old) => old.remove());
  begin();
  dispatchEvent(new Event("drawn"));
}

let kept; // the theme that was chosen
try { kept = localStorage.theme; } catch {} // refused
dress(kept ?? (DARK.matches ? "dark" : "light"));
DARK.addEventListener("change", () => kept ?? dress(DARK.matches ? "dark" : "light"));
addEventListener("beforeprint", printed);
addEventListener("hashchange", moved);
begin();
toPart();
