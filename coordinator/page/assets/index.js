// The first page of the server: evaluations and trainings of the work folder.

if (DATA.kind === "index") PARTS.push({ id: "evaluations", name: "Evaluations", make: evaluationsPart }, { id: "trainings", name: "Trainings", make: trainingsPart });

function evaluationsPart() {
  const link = (row) => el("a", { href: `/evaluation/${encodeURIComponent(row.evaluation_id)}` }, said(row.evaluation_id));
  const columns = [{ name: "evaluation", of: (r) => r.evaluation_id, show: link }, { name: "suite", of: (r) => r.suite }, { name: "step", of: (r) => r.step, right: true }, { name: "status", of: (r) => r.status, show: (r) => el("span", { title: r.status }, said(r.status.split(": ")[0], / since |failed/.test(r.status) ? "said trouble" : "said")) },
    { name: "scored", of: (r) => r.scored / (r.entries || 1), show: (r) => `${r.scored} of ${r.entries}`, right: true }, { name: "shards", of: (r) => r.shards_done / (r.shards || 1), show: (r) => `${r.shards_done.toLocaleString("en")} of ${r.shards.toLocaleString("en")}`, right: true },
    { name: "accepted", of: (r) => r.accepted_at, show: (r) => when(r.accepted_at) }];
  const halts = [...new Set(DATA.evaluations.filter((r) => / since /.test(r.status)).map((r) => r.status.replace(/ since .*?: /, ": ")))];
  const list = table(columns, DATA.evaluations, { label: "evaluations", order: [6, false] });
  const find = search("find", (text) => list.show(DATA.evaluations.filter((r) => Object.values(r).join(" ").toLowerCase().includes(text))));
  return section("evaluations", "Evaluations", `${DATA.running} running or waiting; ${DATA.halted ? `${DATA.halted} stopped or parked; ` : ""}the last ${DATA.evaluations.length - DATA.running - DATA.halted} that have ended.`, halts.map((why) => el("p", {}, said(why, "said trouble"))), el("div", { class: "tools" }, find), list);
}

function trainingsPart() {
  const link = (row) => el("a", { href: `/training?folder=${encodeURIComponent(row[0])}&suite=${encodeURIComponent(row[1])}` }, said(row[0]));
  const columns = [{ name: "folder of checkpoints", of: (r) => r[0], show: link }, { name: "suite", of: (r) => r[1] }, { name: "evaluations", of: (r) => r[2], right: true }];
  return section("trainings", "Trainings", null, table(columns, DATA.trainings, { label: "trainings" }));
}
