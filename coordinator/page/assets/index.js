// The first page of the server: evaluations and trainings of the work folder.

if (DATA.kind === "index") PARTS.push({ id: "evaluations", name: "Evaluations", make: evaluationsPart }, { id: "trainings", name: "Trainings", make: trainingsPart });

function evaluationsPart() {
  const link = (row) => el("a", { href: `/evaluation/${encodeURIComponent(row[0])}` }, said(row[0]));
  const columns = [{ name: "evaluation", of: (r) => r[0], show: link }, { name: "suite", of: (r) => r[1] }, { name: "step", of: (r) => r[2], right: true }, { name: "status", of: (r) => r[3], show: (r) => el("span", { title: r[3] }, said(r[3].split(": ")[0], / since |failed/.test(r[3]) ? "said trouble" : "said")) },
    { name: "scored", of: (r) => r[4] / (r[5] || 1), show: (r) => `${r[4]} of ${r[5]}`, right: true }, { name: "shards", of: (r) => r[6] / (r[7] || 1), show: (r) => `${r[6].toLocaleString("en")} of ${r[7].toLocaleString("en")}`, right: true },
    { name: "accepted", of: (r) => r[8], show: (r) => when(r[8]) }];
  const halts = [...new Set(DATA.evaluations.filter((r) => / since /.test(r[3])).map((r) => r[3].replace(/ since .*?: /, ": ")))];
  const list = table(columns, DATA.evaluations, { label: "evaluations", order: [6, false] });
  const find = search("find", (text) => list.show(DATA.evaluations.filter((r) => r.join(" ").toLowerCase().includes(text))));
  return section("evaluations", "Evaluations", `${DATA.running} running or waiting; ${DATA.halted ? `${DATA.halted} stopped or parked; ` : ""}the last ${DATA.evaluations.length - DATA.running - DATA.halted} that have ended.`, halts.map((why) => el("p", {}, said(why, "said trouble"))), el("div", { class: "tools" }, find), list);
}

function trainingsPart() {
  const link = (row) => el("a", { href: `/training?folder=${encodeURIComponent(row[0])}&suite=${encodeURIComponent(row[1])}` }, said(row[0]));
  const columns = [{ name: "folder of checkpoints", of: (r) => r[0], show: link }, { name: "suite", of: (r) => r[1] }, { name: "evaluations", of: (r) => r[2], right: true }];
  return section("trainings", "Trainings", null, table(columns, DATA.trainings, { label: "trainings" }));
}
