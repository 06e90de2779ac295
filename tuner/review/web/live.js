"use strict";
// A run's page while it runs: what changed is fetched and drawn again, never more often than the
// page can take. The figures that take long come after the table and the progress.

(() => {
  // Between two updates at least this, and so many times what the last one took: the machine that
  // draws is often the one that measures.
  const LEAST_MS = 400, SHARE = 3, CHART_SHARE = 10;
  const byId = (id) => document.getElementById(id);
  const name = byId("live").dataset.run, path = `/runs/${encodeURIComponent(name)}`;
  const blank = {label: "", caption: "being drawn …", figure: null};
  const charts = Object.fromEntries([...document.querySelectorAll(".chart")]
    .map((chart) => [chart.id.replace("chart-", ""), blank]));
  let wanted = "the first", shown = "", isBusy = false, job = null, later = 0;
  const say = (text) => { byId("loading").textContent = text; };

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
  const MOST_POINTS = 2000, LISTS = ["x", "y", "customdata", "hovertext", "text"];
  function keep(newer) {
    const rows = data.columns[0].values, times = data.columns.find((c) => c.name === "latency_us").values;
    const latency = new Map(rows.map((number, row) => [number, times[row] ?? Infinity]));
    for (const [name, chart] of Object.entries(newer)) {
      const traces = (chart.figure?.data ?? []).filter((t) => t.mode === "markers" && t.customdata);
      const total = traces.reduce((sum, trace) => sum + trace.x.length, 0);
      if (total > MOST_POINTS) {
        for (const trace of traces) thin(trace, Math.ceil(trace.x.length * MOST_POINTS / total), latency);
        chart.caption += ` Drawn here: ${MOST_POINTS.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} points, the fastest and an even share of the rest.`;
      }
      charts[name] = chart;
    }
  }
  function thin(trace, most, latency) {
    const count = trace.x.length, order = [...trace.x.keys()];
    order.sort((a, b) => latency.get(trace.customdata[a]) - latency.get(trace.customdata[b]) || a - b);
    const half = most >> 1, step = (count - half) / (most - half), kept = order.slice(0, half);
    for (let at = half; at < count; at += step) kept.push(order[Math.floor(at)]);
    kept.sort((a, b) => a - b);
    for (const list of LISTS) {
      if (Array.isArray(trace[list])) trace[list] = kept.map((index) => trace[list][index]);
    }
  }
  let data = null, chartsOf = "", chartsAt = -Infinity, chartsTook = 0, isRunning = true;
  async function update() {
    if (isBusy) return;
    const start = performance.now(), left = chartsAt + CHART_SHARE * chartsTook - start;
    const isDue = chartsOf !== wanted && (!isRunning || left <= 0);
    if (wanted === shown && !isDue) return;
    isBusy = true;
    try {
      if (wanted !== shown) await updateData();
      if (isDue) await updateCharts();
    } catch (error) {
      site.say(String(error.message));
      shown = chartsOf = wanted;  // asked again when the run changes
    }
    say("");
    const now = performance.now();
    setTimeout(() => { isBusy = false; update(); }, Math.max(LEAST_MS, SHARE * (now - start)));
    if (chartsOf !== wanted) {
      clearTimeout(later);
      later = setTimeout(update, Math.max(LEAST_MS, chartsAt + CHART_SHARE * chartsTook - now));
    }
  }
  async function updateData() {
    say("loading …");
    data = await get("data");
    keep(data.charts);
    tunerPage.show({...data, charts: {...charts}});
    shown = data.stamp;
    document.body.dataset.shown = String(data.columns[0].values.length);
  }
  async function updateCharts() {
    const start = performance.now();
    for (let group = 1; group < data.num_groups; group += 1) {
      say("drawing the other figures …");
      await new Promise(requestAnimationFrame);
      keep((await get(`charts/${group}`)).charts);
      tunerPage.show({...data, parts: {}, charts: {...charts}});
    }
    [chartsOf, chartsAt, chartsTook] = [shown, performance.now(), performance.now() - start];
    document.body.dataset.drawn = document.body.dataset.shown;
  }

  byId("stop").addEventListener("click", () => site.ask(`${path}/stop`));
  byId("resume")?.addEventListener("click", () => site.ask(`${path}/resume`));

  site.follow(`${path}/events`, ({stamp, run, job: now}) => {
    const speed = run.speedup === null ? "" : `, best ${run.is_proved ? "" : "so far "}${site.ratio(run.speedup)}`;
    byId("state").textContent = run.state;
    byId("state").className = `state ${run.state}`;
    byId("told").textContent = `${run.num_trials.toLocaleString("en-US")} trials${speed}`;
    job = now;
    byId("stop").hidden = !job?.is_alive;
    byId("stop").textContent = job?.num_stops ? "Stop at once" : "Stop";
    const resume = byId("resume");
    if (resume) resume.hidden = run.state === "running" || run.state === "finished" || Boolean(job?.is_alive);
    byId("output").hidden = !job?.output;
    if (job) byId("output").querySelector("pre").textContent = job.output;
    if (run.problem) site.say(run.problem);
    isRunning = run.state === "running";
    wanted = stamp;
    update();
  });
  update();
})();
