// Of a served page: asks, while it is seen, whether its data have changed, and draws the page anew.

const LOOK_MS = 2000; // between two questions to the server

function stayCurrent() {
  const state = el("span", { class: "note", role: "status" });
  const show = () => {
    document.querySelector("nav").insertBefore(state, document.querySelector("nav button"));
    document.querySelector("nav strong").replaceWith(el("a", { class: "strong", href: "/", text: "evalspan" }));
  };
  let [busy, used] = [false, false];
  // what a reader has opened, chosen or typed would be lost: the page then waits for a word
  for (const kind of ["input", "click", "focusin"]) addEventListener(kind, (event) => { used ||= event.target.closest?.("main") !== null; }, true);
  const ask = async (address, headers) => {
    const answer = await fetch(address, { headers });
    if (!answer.ok) throw new Error(answer.status);
    return answer;
  };
  const again = async () => {
    renew(await (await ask(location.href, { Accept: "application/json" })).json());
    used = false;
    show();
    state.textContent = `as of ${new Date(DATA.made_at * 1000).toLocaleTimeString()}`;
  };
  const look = async () => {
    if (document.hidden || busy) return;
    busy = true;
    try {
      const mark = await (await ask(`/changes?of=${encodeURIComponent(location.pathname + location.search)}`)).text();
      if (mark === DATA.mark) state.textContent ||= "shows what the files say";
      else if (used) state.replaceChildren(el("button", { type: "button", text: "show newer data", onclick: again }));
      else await again();
    } catch {
      state.textContent = "the server does not answer";
    }
    busy = false;
  };
  show();
  setInterval(look, LOOK_MS);
  addEventListener("visibilitychange", look);
  look();
}

function renew({ data, blocks }) {
  for (const key of Object.keys(DATA)) delete DATA[key];
  Object.assign(DATA, data);
  document.querySelectorAll("script[id^='block-']").forEach((old) => old.remove());
  for (const [name, text] of Object.entries(blocks)) document.body.append(el("script", { type: "application/gzip", id: `block-${name}`, text }));
  const at = scrollY;
  drawAgain();
  scrollTo(0, at);
}

stayCurrent();
