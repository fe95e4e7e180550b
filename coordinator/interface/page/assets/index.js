// The first page of the server: the trainings of a work folder, the newest first, and its evaluations.

if (DATA.kind === "index") PARTS.push({ id: "trainings", name: "Trainings", make: trainingsPart }, { id: "evaluations", name: "Evaluations", make: evaluationsPart });

const MOST_STATES = 3; // evaluations of a training that are not done, named on its card

function trainingsPart() {
  const list = el("div", { class: "cards" }), count = el("p", { class: "note", role: "status" });
  const draw = (text) => {
    const found = DATA.trainings.filter((t) => `${t.folder} ${t.suite}`.toLowerCase().includes(text));
    count.textContent = !DATA.trainings.length ? "No checkpoint was evaluated here yet." : `${found.length} of ${DATA.trainings.length}, the one with the newest checkpoint first. Each in the words of "evalspan status".`;
    const several = found.filter((t) => t.checkpoints > 1), alone = found.filter((t) => t.checkpoints < 2);
    list.replaceChildren(...several.map(card), ...(alone.length ? [el("details", { open: !several.length || alone.length === 1 }, el("summary", { text: `${alone.length} of one checkpoint` }), el("div", { class: "cards" }, alone.map(card)))] : []));
  };
  draw(sought("training"));
  return section("trainings", "Trainings", null, DATA.trainings.length > 5 ? el("div", { class: "tools" }, search("find a training", draw, "training")) : null, count, list);
}

function card(one) {
  const names = Object.keys(one.lines), newest = one.scored.at(-1);
  const last = (name) => one.lines[name].findLast((v) => v !== null);
  const legend = names.map((name, i) => el("span", {}, el("span", { class: "swatch", style: { background: `var(--line-${i % SERIES})` } }), said(name), ` ${score(last(name))}`));
  return el("article", { class: "card" },
    el("h3", {}, el("a", { href: address.training(one.folder, one.suite) }, said(one.name)), el("small", {}, " ", said(one.mode === "exact" ? one.suite : `${one.suite}, ${one.mode} mode`))),
    el("div", {}, newest ? el("div", {}, "newest score: ", el("a", { href: address.evaluation(newest[0]) }, said(stepOf(newest[1])))) : "no score yet",
      el("div", { class: "soft", text: `${one.scored.length} of ${one.checkpoints} checkpoints scored; ${one.slot} time ${seconds(one.gpu_seconds)}` })),
    el("div", {}, names.length ? sparkline(Object.values(one.lines), `scores by checkpoint, the last: ${names.map((n) => `${n} ${score(last(n))}`).join(", ")}`) : null, el("div", { class: "legend" }, legend)),
    el("div", {}, one.standing ? clausesOf(one.standing) : el("div", { class: "soft", text: one.states.length === one.checkpoints ? "" : "its checkpoints are being compared" })),
    el("div", { class: "states" }, one.states.slice(0, MOST_STATES).map(([id, label, word, text]) => el("div", {}, el("span", { class: `state ${word}` }, el("a", { href: address.evaluation(id) }, said(stepOf(label))), " ", said(text)), commandFor(id, word, text))),
      one.states.length > MOST_STATES ? el("a", { href: `#part=evaluations&find=${encodeURIComponent(one.folder.split("/").at(-1))}`, text: `and ${one.states.length - MOST_STATES} more` }) : null));
}

function evaluationsPart() {
  const { bar, column } = boxes(DATA.evaluations.toSorted((a, b) => a.accepted_at - b.accepted_at).map((r) => r.evaluation_id));
  const columns = [column((r) => r.evaluation_id), { name: "evaluation", of: (r) => r.evaluation_id, show: (r) => el("a", { href: address.evaluation(r.evaluation_id) }, said(r.evaluation_id)) }, { name: "suite", of: (r) => r.suite }, { name: "step", of: (r) => r.step, right: true },
    { name: "state", of: (r) => r.status, show: (r) => el("span", { class: `state ${r.word}`, title: r.status }, said(r.status.split(": no process")[0])) },
    { name: "scored", of: (r) => r.scored / (r.entries || 1), show: (r) => `${r.scored} of ${r.entries}`, right: true }, { name: "makespan", of: (r) => r.makespan_seconds, show: (r) => seconds(r.makespan_seconds), right: true },
    { name: `${slotOf(DATA.evaluations)} time`, of: (r) => r.gpu_seconds, show: (r) => seconds(r.gpu_seconds), right: true }, { name: "accepted", of: (r) => r.accepted_at, show: (r) => when(r.accepted_at) }];
  let [text, only] = [sought("find"), STATE.get("state") ?? ""];
  const wanted = (r) => (!only || r.word === only) && `${r.evaluation_id} ${r.folder} ${r.suite} ${r.status}`.toLowerCase().includes(text);
  const list = table(columns, DATA.evaluations.filter(wanted), { label: "evaluations", order: [8, false], key: "sort" });
  const draw = () => list.show(DATA.evaluations.filter(wanted));
  const words = [...new Set(DATA.evaluations.map((r) => r.word))].map((word) => [word, `${word} (${DATA.evaluations.filter((r) => r.word === word).length})`]);
  return section("evaluations", "Evaluations", `${DATA.running} running or waiting; ${DATA.halted ? `${DATA.halted} stopped or parked; ` : ""}the last ${DATA.evaluations.length - DATA.running - DATA.halted} that have ended.`,
    el("div", { class: "tools" }, search("find", (v) => { text = v; draw(); }, "find"), choice("state", [["", `all (${DATA.evaluations.length})`], ...words], (v) => { only = v; draw(); }, "state"), bar), list);
}
