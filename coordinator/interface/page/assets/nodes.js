// Nodes: a map of how they stand, with reasons and until when; and how their weights were staged.

if (DATA.kind === "evaluation" || DATA.kind === "index") PARTS.push({ id: "nodes", name: "Nodes", make: nodesPart });

const BAD_NODES = ["cordoned", "back-off", "withdrawn"];

/** A tile per node: name, how it stands, bytes staged, and why. `bytesOf`: node -> bytes. */
function nodeMap(bytesOf) {
  const over = DATA.kind === "evaluation" && DATA.report.status !== "running";
  const most = Math.max(1, ...bytesOf.values());
  const tiles = DATA.standing.map(([name, status, why, until]) => {
    const bad = BAD_NODES.includes(status), staged = bytesOf.get(name) ?? 0;
    const word = over ? (bad ? `${status} at the end` : "used") : until ? `${status} until ${when(until)}` : status;
    return el("li", { class: bad ? "bad" : status }, said(name, "said strong"), el("span", { text: staged ? `${word}, ${bytes(staged)} staged` : word }),
      staged ? el("span", { class: "fill", style: { width: `${100 * staged / most}%` } }) : null, why ? said(bad || !over ? why : `the last trouble: ${why}`, "said soft") : null);
  });
  return tiles.length ? el("ul", { class: "nodes" }, tiles) : null;
}

function nodesPart() {
  if (DATA.kind === "index") return section("nodes", "Nodes", DATA.standing.length ? "Nodes of evaluations that run, and cordoned ones." : "No node is in use or cordoned.", nodeMap(new Map()));
  const columns = [{ name: "node", of: (r) => r[0] }, { name: "weights", of: (r) => r[1] }, { name: "GPUs", of: (r) => r[2] }, { name: "staged", of: (r) => r[3], show: (r) => bytes(r[3]), right: true },
    { name: "from storage", of: (r) => r[4], show: (r) => bytes(r[4]), right: true }, { name: "seconds", of: (r) => r[5], show: (r) => seconds(r[5]), right: true },
    { name: "before its GPUs", of: (r) => r[6], show: (r) => seconds(r[6]), right: true }, { name: "why", of: (r) => r[7] }];
  return section("nodes", "Nodes", "Where the weights were staged, and how. \"Before its GPUs\": seconds that they were there ahead of the first free GPU.", nodeMap(new Map(DATA.nodes.map((r) => [r[0], r[3]]))), table(columns, DATA.nodes, { label: "nodes" }));
}

