"use strict";
// The list of all runs: filter, sort, choose, start; kept up to date by the server's events.

(() => {
  const byId = (id) => document.getElementById(id);
  const table = byId("runs"), body = table.tBodies[0], runs = new Map(), chosen = new Set();
  const labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  let by = "age_s", isUp = true;

  function make(tag, text = "", name = "") {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = name;
    return made;
  }
  // Names of modules are long: a line may break behind each underscore.
  function breakable(made) {
    const parts = made.textContent.split(/(?<=_)/);
    made.replaceChildren(...parts.flatMap((part, i) => i ? [document.createElement("wbr"), part] : [part]));
    return made;
  }
  const ageOf = (run) => run.age_s + (performance.now() - run.since) / 1000;
  const valueOf = (run) => by === "age_s" ? ageOf(run) : run[by];

  function ordered() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const state = byId("state").value;
    const found = [...runs.values()].filter((run) => (!state || run.state === state)
      && words.every((word) => run.text.includes(word)));
    return found.sort((a, b) => {
      const [left, right] = [valueOf(a), valueOf(b)];
      if (left === null || right === null) return (left === null) - (right === null);
      const order = typeof left === "number" ? left - right : left.localeCompare(right, "en");
      return (isUp ? order : -order) || (a.name < b.name ? 1 : -1);
    });
  }
  function rowOf(run) {
    const row = document.createElement("tr"), pick = document.createElement("input");
    row.dataset.run = run.name;
    pick.type = "checkbox";
    pick.checked = chosen.has(run.name);
    pick.setAttribute("aria-label", `Compare ${run.name}`);
    pick.addEventListener("change", () => {
      if (pick.checked) chosen.add(run.name); else chosen.delete(run.name);
      updateCompare();
    });
    const link = breakable(make("a", run.title));
    link.href = `/runs/${encodeURIComponent(run.name)}`;
    const cells = [make("td"), make("td"), make("td"), make("td", run.device), make("td", "–", "number"),
      make("td", run.num_trials.toLocaleString("en-US"), "number"), make("td", site.age(ageOf(run)), "number age"),
      breakable(make("td", run.name, "name"))];
    cells[0].append(pick);
    cells[1].append(make("span", run.state, `state ${run.state}`));
    cells[2].append(link, ...(run.sizes ? [make("span", run.sizes, "sizes")] : []),
      make("span", [run.op, run.accuracy].filter((word) => word !== run.title).join(", "), "range"));
    if (run.problem) cells[2].append(make("span", run.problem, "why"));
    if (run.note) {
      const noted = make("span", "", "range");
      noted.append(...run.tags.map(site.tag), run.note);
      cells[2].append(noted);
    }
    if (run.speedup !== null) {
      cells[4].replaceChildren(make("span", (run.is_verified ? "" : "~") + site.ratio(run.speedup), `tone ${run.tone}`));
      if (run.is_verified && run.low !== null && run.high !== null) {
        cells[4].append(make("span", `${site.ratio(run.low)} to ${site.ratio(run.high)}`, "range"));
      }
      if (run.caveat) {
        cells[4].append(make("span", `least ${site.ratio(run.least)}`, `tone ${run.tone} least`),
          make("span", run.caveat, "caveat"));
      }
    }
    cells.forEach((cell, index) => { cell.dataset.label = labels[index]; });
    row.append(...cells);
    return row;
  }
  // Each problem's runs under a heading of their own, in the order in which they come.
  function grouped(found) {
    const groups = new Map();
    for (const run of found) groups.set(run.problemName, [...groups.get(run.problemName) ?? [], run]);
    return [...groups].flatMap(([name, members]) => {
      const row = make("tr", "", "group"), cell = make("th", `${name} `);
      const best = Math.max(...members.map((run) => run.is_verified ? run.speedup : 0));
      cell.colSpan = labels.length;
      cell.scope = "rowgroup";
      cell.append(make("span", `${members.length} ${members.length === 1 ? "run" : "runs"}${best ? `, best ${site.ratio(best)}` : ""}`, "soft"));
      row.append(cell);
      return [row, ...members.map(rowOf)];
    });
  }
  function render() {
    const found = ordered();
    const focused = document.activeElement?.closest?.("#runs tbody tr")?.dataset.run;
    const isBox = document.activeElement?.type === "checkbox";
    body.replaceChildren(...(byId("group").checked ? grouped(found) : found.map(rowOf)));
    if (focused) body.querySelector(`tr[data-run="${CSS.escape(focused)}"] ${isBox ? "input" : "a"}`)?.focus();
    byId("shown").textContent = `${found.length} of ${runs.size} runs shown`;
    byId("none").hidden = runs.size > 0;
    for (const cell of table.tHead.rows[0].cells) {
      if (cell.dataset.by === by) cell.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    }
  }
  function updateCompare() {
    byId("compare").disabled = chosen.size < 2;
    byId("compare").textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  }
  function showJobs(jobs) {
    const box = byId("jobs");
    const open = new Set([...box.querySelectorAll("details[open]")].map((d) => d.dataset.key));
    box.hidden = !jobs.length;
    box.replaceChildren(...jobs.slice(0, 5).map((job, index) => {
      const made = document.createElement("div"), details = document.createElement("details");
      const head = make("span", `${job.what}: ${job.is_alive ? (job.num_stops ? "stopping" : "running")
        : job.exit_code === 0 ? "done" : `ended with exit code ${job.exit_code}`} `);
      const key = `${jobs.length - index}`;
      made.append(head);
      if (job.run) {
        const link = make("a", job.run);
        link.href = `/runs/${encodeURIComponent(job.run)}`;
        made.append(link, " ");
        if (job.is_alive) {
          const stop = make("button", job.num_stops ? "Stop at once" : "Stop");
          stop.type = "button";
          stop.addEventListener("click", () => site.ask(`/runs/${encodeURIComponent(job.run)}/stop`));
          made.append(stop);
        }
      }
      details.dataset.key = key;
      details.open = open.has(key) || (!job.is_alive && job.exit_code !== 0 && index === 0);
      const text = make("pre", job.output, "wrap");
      text.tabIndex = 0;
      details.append(make("summary", "What it prints"), text);
      made.append(details);
      return made;
    }));
  }

  for (const cell of table.tHead.rows[0].cells) {
    cell.querySelector("button")?.addEventListener("click", () => {
      isUp = by === cell.dataset.by ? !isUp : !["speedup", "num_trials"].includes(cell.dataset.by);
      by = cell.dataset.by;
      render();
    });
  }
  byId("filter").addEventListener("input", render);
  byId("state").addEventListener("change", render);
  byId("group").addEventListener("change", render);
  byId("compare").addEventListener("click", () => {
    location.href = "/compare?" + [...chosen].map((name) => `run=${encodeURIComponent(name)}`).join("&");
  });
  byId("start")?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = event.target.querySelector("button");
    button.disabled = true;
    await site.ask("/start", Object.fromEntries(new FormData(event.target)));
    button.disabled = false;
  });
  setInterval(() => {
    for (const row of body.querySelectorAll("tr[data-run]")) row.querySelector(".age").textContent = site.age(ageOf(runs.get(row.dataset.run)));
  }, 10000);

  site.follow("/events", (news) => {
    for (const name of news.gone) { runs.delete(name); chosen.delete(name); }
    for (const run of news.runs) {
      const problemName = [run.title, run.sizes, run.accuracy, run.device].filter(Boolean).join(" · ");
      const text = `${run.name}\n${problemName}\n${run.op}\n${run.state}\n${run.note}`;
      runs.set(run.name, {...run, problemName, since: performance.now(), text: text.toLowerCase()});
    }
    render();
    updateCompare();
    showJobs(news.jobs);
  });
})();
