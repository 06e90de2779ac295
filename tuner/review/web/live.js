"use strict";
// A run's page while it runs: what changed is fetched and drawn again, never more often than the
// page can take. The figures that take long come after the table and the progress.

(() => {
  // Between two updates at least this, and so many times what the last one took: the machine that
  // draws is often the one that measures.
  const LEAST_MS = 400, SHARE = 3, CHART_SHARE = 10, NEAR = "600px";
  const byId = (id) => document.getElementById(id);
  const name = byId("live").dataset.run, path = `/runs/${encodeURIComponent(name)}`;
  const say = (text) => { byId("loading").textContent = text; };
  // `wanted` is how the run is now; `shown` how the table has it, `partsOf` the texts, `chartsOf`
  // each figure.
  let wanted = "", shown = "", partsOf = "", isBusy = false, later = 0, data = null;
  let isRunning = site.isWorking(byId("state").textContent);
  let tableAt = -Infinity, tableTook = 0, chartsAt = -Infinity, chartsTook = 0;
  const chartsOf = new Map([...document.querySelectorAll(".chart")]
    .map((chart) => [chart.id.replace("chart-", ""), ""]));
  const near = new Set();

  tunerPage.sourceOf = async (number) => {
    const answer = await fetch(`${path}/source/${number}`);
    return answer.ok ? answer.json() : null;
  };
  async function get(what) {
    const answer = await fetch(`${path}/${what}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  // A live figure is drawn again and again, so it gets no more points than a browser draws in a
  // moment: of each kind the fastest, and an even share of the rest. The table has them all.
  const MOST_POINTS = 1200, LISTS = ["x", "y", "customdata"];
  function thinned(charts) {
    const rows = data.columns[0].values, times = data.columns.find((c) => c.name === "latency_us").values;
    const latency = new Map(rows.map((number, row) => [number, times[row] ?? Infinity]));
    for (const chart of Object.values(charts)) {
      const traces = (chart.figure?.data ?? []).filter((t) => t.meta === "trials");
      const total = traces.reduce((sum, trace) => sum + trace.x.length, 0);
      if (total <= MOST_POINTS) continue;
      for (const trace of traces) thin(trace, Math.ceil(trace.x.length * MOST_POINTS / total), latency);
      chart.caption += ` Drawn here: ${MOST_POINTS.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} points, the fastest and an even share of the rest.`;
    }
    return charts;
  }
  function thin(trace, most, latency) {
    const count = trace.x.length, order = [...trace.x.keys()];
    order.sort((a, b) => latency.get(trace.customdata[a]) - latency.get(trace.customdata[b]) || a - b);
    const half = most >> 1, step = (count - half) / (most - half), kept = order.slice(0, half);
    for (let at = half; at < count; at += step) kept.push(order[Math.floor(at)]);
    kept.sort((a, b) => a - b);
    for (const list of LISTS) trace[list] = kept.map((index) => trace[list][index]);
  }

  // ---- what is old, and how it is renewed: the table, the texts, the figures near the reader;
  // and once the run stands still all others
  const tableDue = () => tableAt + Math.max(LEAST_MS, SHARE * tableTook);
  const chartsDue = () => isRunning ? chartsAt + CHART_SHARE * chartsTook : -Infinity;
  const isDue = (at) => performance.now() >= at;
  const isOldTable = () => !shown || wanted && wanted !== shown;
  const isWanted = ([chart, stamp]) => stamp !== shown && (near.has(chart) || !isRunning);

  function update() {
    if (isBusy) return;
    isBusy = true;
    renew().catch((error) => {
      site.say(String(error.message));
      shown = partsOf = wanted;  // asked again when the run changes
      for (const chart of chartsOf.keys()) chartsOf.set(chart, wanted);
    }).finally(() => { isBusy = false; say(""); });
  }
  async function renew() {
    if (isOldTable() && isDue(tableDue())) await renewTable();
    await renewOthers();
    const isLeft = partsOf !== shown || [...chartsOf].some(isWanted);
    if (!isLeft) document.body.dataset.drawn = document.body.dataset.shown;
    clearTimeout(later);
    const next = Math.min(isOldTable() ? tableDue() : Infinity, isLeft ? chartsDue() : Infinity);
    if (next < Infinity) later = setTimeout(update, Math.max(50, next - performance.now()));
  }
  async function renewTable() {
    const start = performance.now();
    say("loading …");
    data = await get("data");
    thinned(data.charts);
    tunerPage.show(data);
    shown = data.stamp;
    for (const chart of Object.keys(data.charts)) renewed(chart);
    document.body.dataset.shown = String(data.columns[0].values.length);
    [tableAt, tableTook] = [performance.now(), performance.now() - start];
    // It is seen, and the first figure drawn, before more is asked for.
    for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame);
  }
  async function renewOthers() {
    const start = performance.now(), areDue = isDue(chartsDue());
    let count = 0;
    if (partsOf !== shown && areDue) {
      tunerPage.showParts((await get("rest")).parts);
      partsOf = shown;
      count += 1;
    }
    for (;;) {
      if (!isRunning && isOldTable()) break;  // its last words: the table first
      const old = [...chartsOf].filter((entry) => isWanted(entry) && (areDue || !entry[1]));
      if (!old.length) break;
      const [chart] = old.find(([other]) => near.has(other)) ?? old[0];
      say("drawing the other figures …");
      await new Promise(near.has(chart) ? requestAnimationFrame : requestIdleCallback);
      tunerPage.showCharts(thinned((await get(`charts/${chart}`)).charts));
      renewed(chart);
      count += 1;
    }
    if (count && areDue) [chartsAt, chartsTook] = [performance.now(), performance.now() - start];
  }
  function renewed(chart) {
    chartsOf.set(chart, shown);
    byId(`figure-${chart}`).classList.remove("awaited");
  }
  const watch = new IntersectionObserver((entries) => {
    for (const {isIntersecting, target} of entries) {
      const chart = target.id.replace("figure-", "");
      if (isIntersecting) near.add(chart); else near.delete(chart);
    }
    if (shown) update();
  }, {rootMargin: NEAR});
  for (const chart of chartsOf.keys()) watch.observe(byId(`figure-${chart}`));

  // ---- what whoever waits wants to know: the phase, how far it is, and what is left
  let waiting = null, sentAt = 0;
  function write(id, text) {  // only what changed: a reader of the screen says every change
    const place = byId(id).querySelector("span") ?? byId(id);
    if (place.textContent !== text) place.textContent = text;
    byId(id).hidden = !text;
  }
  function leftWords(left) {
    if (left < -5) return "longer than expected";
    if (left < 1) return "a moment left";
    return `about ${left < 100 ? `${Math.round(left)} s` : `${Math.round(left / 60)} min`} left`;
  }
  function tick() {
    if (!waiting) return;
    const age = waiting.age_s + (performance.now() - sentAt) / 1000, bar = byId("bar");
    const words = [waiting.counted || `for ${Math.floor(age)} s`];
    if (waiting.left_s !== null) words.push(leftWords(waiting.left_s - age));
    byId("counted").textContent = words.join(", ");
    bar.setAttribute("aria-valuetext", words.join(", "));
    bar.toggleAttribute("aria-valuenow", waiting.total !== null);
    bar.toggleAttribute("aria-valuemax", waiting.total !== null);
    if (waiting.total !== null) {
      bar.setAttribute("aria-valuemax", waiting.total);
      bar.setAttribute("aria-valuenow", Math.min(waiting.done, waiting.total));
    }
    const share = waiting.total ? Math.min(1, waiting.done / waiting.total) : null;
    bar.firstElementChild.style.width = share === null ? "" : `${100 * share}%`;
  }
  function showWaiting(found) {
    [waiting, sentAt] = [found, performance.now()];
    byId("waiting").hidden = !found;
    if (!found) return;
    write("phase", found.phase[0].toUpperCase() + found.phase.slice(1));
    write("stage", found.stage);
    write("rate", found.rate);
    write("finalists", found.finalists);
    showBands(found.bands);
    write("plan", found.plan);
    write("log", found.log);
    byId("verdicts").replaceChildren(...found.verdicts.map((text) => {
      const made = document.createElement("li");
      made.textContent = text;
      return made;
    }));
    tick();
  }
  // A band for each device and for the builders of each host: which share is busy, which is lost.
  function showBands(bands) {
    const list = byId("bands");
    list.hidden = !bands.length;
    while (list.childElementCount > bands.length) list.lastElementChild.remove();
    bands.forEach((band, place) => {
      let row = list.children[place];
      if (!row) {
        row = list.appendChild(document.createElement("li"));
        row.innerHTML = '<span class="name"></span><span class="band" aria-hidden="true"><i class="busy"></i><i class="lost"></i></span><span class="words"></span>';
      }
      const [name, bar, words] = row.children, [busy, lost] = bar.children;
      name.textContent = band.name;
      words.textContent = band.words;
      busy.style.width = `${100 * band.busy}%`;
      lost.style.width = `${100 * band.lost}%`;
    });
  }
  setInterval(tick, 1000);

  byId("note").addEventListener("submit", async (event) => {
    event.preventDefault();
    const saved = await site.ask(`${path}/note`, Object.fromEntries(new FormData(event.target)));
    byId("saved").textContent = saved ? "Saved." : "";
    if (saved) byId("tags").replaceChildren(...saved.tags.map(site.tag));
  });

  byId("stop").addEventListener("click", () => site.ask(`${path}/stop`));
  byId("resume")?.addEventListener("click", () => site.ask(`${path}/resume`));

  site.follow(`${path}/events`, ({stamp, run, job, waiting: found}) => {
    const speed = run.speedup === null ? "" : `, best ${run.is_verified ? "" : "so far "}${site.ratio(run.speedup)}`;
    byId("state").textContent = run.state;
    byId("state").className = `state ${run.state}`;
    byId("count").textContent =
      `${run.num_trials.toLocaleString("en-US")} ${run.num_trials === 1 ? "trial" : "trials"}${speed}`;
    byId("stop").hidden = !job?.is_alive;
    byId("stop").textContent = job?.num_stops ? "Stop at once" : "Stop";
    const resume = byId("resume");
    if (resume) resume.hidden = site.isWorking(run.state) || run.state === "finished" || Boolean(job?.is_alive);
    byId("output").hidden = !job?.output;
    if (job) byId("output").querySelector("pre").textContent = job.output;
    showWaiting(found);
    if (run.problem) site.say(run.problem);
    isRunning = site.isWorking(run.state);
    wanted = stamp;
    update();
  });
  update();
})();
