// Tasks by checkpoints: each cell a score, its colour the change in yardsticks (standard errors of a difference), or its place in the row's range.

if (DATA.kind === "training") PARTS.push({ id: "heatmap", name: "Tasks × checkpoints", make: heatmapPart }, { id: "cost", name: "Cost", make: costPart });

const STRONG = 4; // yardsticks of a change with the fullest colour

function heatmapPart() {
  const place = el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "scores by task and checkpoint: arrow keys choose a cell" });
  const detail = el("div", { class: "detail", role: "status" });
  let [which, by, text, chosen] = [0, "evidence", "", null];
  const draw = () => { chosen = null; place.replaceChildren(heatmap(DATA.trainings[which], text)); colourCells(place, by); };
  const choose = (cell) => {
    if (!cell?.curve) return;
    chosen?.classList.remove("chosen");
    (chosen = cell).classList.add("chosen");
    cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    detail.replaceChildren(cellDetail(DATA.trainings[which], cell.curve, cell.at));
  };
  place.addEventListener("click", (event) => choose(event.target.closest("td")));
  place.addEventListener("keydown", (event) => {
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [0, 0];
    const table = place.querySelector("table"), row = table.rows[(chosen ? chosen.parentNode.rowIndex : 1) + down];
    if (!down && !right) return;
    event.preventDefault();
    choose(row?.cells[(chosen ? chosen.cellIndex : 1) + right]);
  });
  const tools = el("div", { class: "tools" },
    DATA.trainings.length > 1 ? choice("training", DATA.trainings.map((t, i) => [i, `${t.name} · ${t.suite}`]), (v) => { which = Number(v); draw(); }) : null,
    choice("colour by", [["evidence", "change from the checkpoint before, in standard errors of a difference"], ["range", "place between the row's worst and best"]], (v) => { by = v; colourCells(place, by); }),
    search("find a task", (v) => { text = v; draw(); }));
  draw();
  return section("heatmap", "Tasks × checkpoints", "Blue is better, orange is worse. ! marks a checkpoint that shows a score to be worse, ~ a score that is not comparable with the one before. Choose a cell for its details.", tools, place, detail);
}

function heatmap(training, text) {
  const heads = training.points.map((p) => el("th", { scope: "col", class: "right", title: p[1] }, said(p[1])));
  const rows = training.curves.filter((c) => `${c.task} ${c.measure}`.toLowerCase().includes(text)).map((curve) => {
    const place = new Map(curve.at.map((at, i) => [at, i]));
    const cells = training.points.map((point, at) => {
      const i = place.get(at);
      if (i === undefined || curve.value[i] === null) return el("td", { class: "right", text: "–" });
      return Object.assign(el("td", { text: `${score(curve.value[i])}${curve.marks[i]}` }), { curve, at: i });
    });
    return el("tr", {}, el("th", { scope: "row", title: `${curve.task} ${curve.measure}` }, said(curve.task), el("small", {}, " ", said(curve.measure), curve.up ? null : " (lower is better)")), cells);
  });
  return el("table", { class: "heatmap" }, el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "task" }), heads)), el("tbody", {}, rows));
}

function colourCells(place, by) {
  for (const cell of place.querySelectorAll("td")) {
    if (cell.curve) cell.className = `right heat ${shade(by === "range" ? inRange(cell.curve, cell.at) : evidence(cell.curve, cell.at))}${cell.classList.contains("chosen") ? " chosen" : ""}`;
  }
}

/** -1 to 1: the change from the point before in yardsticks, over STRONG. null: not known. */
function evidence(curve, i) {
  if (i === 0 || curve.marks[i] === "~") return null;
  const [a, b, ea, eb] = [curve.value[i - 1], curve.value[i], curve.stderr[i - 1], curve.stderr[i]];
  const error = curve.yardstick[i] ?? (ea === null || eb === null ? null : Math.hypot(ea, eb)); // of the first checkpoints
  if (a === null || error === null) return null;
  const change = (curve.up ? 1 : -1) * (b - a);
  return error ? Math.max(-1, Math.min(1, change / error / STRONG)) : Math.sign(change);
}

function inRange(curve, i) {
  const [low, high] = curve.range ??= ((values) => [Math.min(...values), Math.max(...values)])(curve.value.filter((v) => v !== null));
  return high > low ? (curve.up ? 1 : -1) * (2 * (curve.value[i] - low) / (high - low) - 1) : 0;
}

const shade = (strength) => (strength === null ? "none" : `${strength < 0 ? "down" : "up"}-${Math.round(Math.abs(strength) * 4)}`);

function cellDetail(training, curve, i) {
  const point = training.points[curve.at[i]], before = i > 0 ? training.points[curve.at[i - 1]] : null;
  const error = curve.stderr[i] === null ? "" : ` ± ${score(curve.stderr[i])}`;
  const change = i > 0 && curve.value[i - 1] !== null ? `; ${(curve.value[i] - curve.value[i - 1]).toFixed(4)} from ${before[1]}` : "";
  const known = curve.yardstick[i] === null ? "" : `, ${(curve.value[i] - curve.mean[i]).toFixed(4)} from the mean before, standard error of a difference ${score(curve.yardstick[i])}`;
  const worse = curve.worse.filter(([at]) => at === i).map(([, words]) => `; ${words}`).join("");
  return el("p", {}, said(curve.task, "said strong"), ` at `, said(point[1]), `: ${score(curve.value[i])}${error}${change}${known}${worse}`,
    curve.documents[i] ? `; ${curve.documents[i].toLocaleString("en")} documents` : "", ". ",
    DATA.mark ? el("a", { href: `/evaluation/${encodeURIComponent(point[0])}`, text: "its page" }) : command(`evalspan report ${quoted(point[0])}`), " ",
    !before ? null : DATA.mark ? el("a", { href: `/compare?id=${encodeURIComponent(before[0])}&id=${encodeURIComponent(point[0])}`, text: `beside ${before[1]}` }) : command(`evalspan compare ${quoted(before[0])} ${quoted(point[0])}`));
}

function costPart() {
  const rows = DATA.trainings.flatMap((t) => t.points.map((point) => ({ training: t, point })));
  const priced = rows.some((r) => r.point[8] !== null);
  const columns = [
    { name: "training", of: (r) => r.training.name }, { name: "suite", of: (r) => r.training.suite }, { name: "checkpoint", of: (r) => r.point[2] ?? r.point[1], show: (r) => r.point[1] },
    { name: "status", of: (r) => r.point[3] }, { name: "accepted", of: (r) => r.point[5], show: (r) => when(r.point[5]) },
    { name: "makespan", of: (r) => r.point[6], show: (r) => seconds(r.point[6]), right: true }, { name: "GPU time", of: (r) => r.point[7], show: (r) => seconds(r.point[7]), right: true },
    ...(priced ? [{ name: "cost", of: (r) => r.point[8], show: (r) => figure(r.point[8]), right: true }] : []),
  ];
  const gpu = rows.reduce((sum, r) => sum + (r.point[7] ?? 0), 0), cost = rows.reduce((sum, r) => sum + (r.point[8] ?? 0), 0);
  return section("cost", "Cost per checkpoint", `${rows.length} evaluations, ${seconds(gpu)} of GPUs${priced ? `, ${figure(cost)} in all` : ""}.`, table(columns, rows, { label: "cost per checkpoint" }));
}
