"use strict";
// A run's page while it runs: what changed is fetched and drawn again, never more often than the
// page can take. The figures that take long come after the table and the progress.

(() => {
  const LEAST_MS = 400, SHARE = 4;  // at most a fifth of the time goes into drawing anew
  const byId = (id) => document.getElementById(id);
  const name = byId("live").dataset.run, path = `/runs/${encodeURIComponent(name)}`;
  const blank = {label: "", caption: "being drawn …", figure: null};
  const charts = Object.fromEntries([...document.querySelectorAll(".chart")]
    .map((chart) => [chart.id.replace("chart-", ""), blank]));
  let wanted = "", shown = "", isBusy = false, job = null;

  tunerPage.sourceOf = async (number) => {
    const answer = await fetch(`${path}/source/${number}`);
    return answer.ok ? answer.json() : null;
  };
  async function get(what) {
    const answer = await fetch(`${path}/${what}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  async function update() {
    if (isBusy || wanted === shown) return;
    isBusy = true;
    const start = performance.now();
    byId("loading").textContent = "loading …";
    try {
      const data = await get("data");
      Object.assign(charts, data.charts);
      tunerPage.show({...data, charts: {...charts}});
      shown = data.stamp;
      byId("loading").textContent = "drawing the other figures …";
      await new Promise(requestAnimationFrame);
      const more = await get("charts");
      Object.assign(charts, more.charts);
      tunerPage.show({...data, parts: {}, charts: {...charts}});
      byId("loading").textContent = "";
      document.body.dataset.shown = String(data.columns[0].values.length);
    } catch (error) {
      byId("loading").textContent = "";
      site.say(String(error.message));
      shown = wanted;  // asked again when the run changes
    }
    setTimeout(() => { isBusy = false; update(); },
      Math.max(LEAST_MS, SHARE * (performance.now() - start)));
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
    wanted = stamp;
    update();
  });
})();
