"use strict";
// What every page needs: asking the server to do something, saying what went wrong, ages.

const site = (() => {
  const key = document.querySelector('meta[name="tune-key"]').content;
  const notice = document.getElementById("notice");

  function say(text) {
    notice.textContent = text.trim();
    notice.hidden = !text;
  }
  // POST words to the server; its refusal is shown and null returned.
  async function ask(path, words = {}) {
    say("");
    try {
      const answer = await fetch(path, {
        method: "POST",
        headers: {"Content-Type": "application/json", "X-Tune-Key": key},
        body: JSON.stringify(words),
      });
      if (answer.ok) return await answer.json();
      say(await answer.text());
    } catch {
      say("The dashboard does not answer; is it still running?");
    }
    return null;
  }
  // Server-sent events while the page is seen: a browser has six connections for all its tabs.
  function follow(path, onState) {
    let source = null;
    const update = () => {
      if (document.hidden) {
        source?.close();
        source = null;
      } else if (!source) {
        source = new EventSource(path);
        source.onmessage = ({data}) => onState(JSON.parse(data));
        source.onerror = () => document.body.classList.add("lost");
        source.onopen = () => document.body.classList.remove("lost");
      }
    };
    document.addEventListener("visibilitychange", update);
    addEventListener("pagehide", () => { source?.close(); source = null; });
    addEventListener("pageshow", update);
    update();
  }
  function age(seconds) {
    for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
    }
    return `${Math.floor(seconds)} s`;
  }
  // As `ratio_words` of the report has it.
  const ratio = (value) => `${value.toFixed(value < 2 ? 3 : value < 10 ? 2 : 1)}x`;
  function tag(word) {
    const made = document.createElement("span");
    [made.className, made.textContent] = ["tag", `#${word}`];
    return made;
  }
  // Whether a process works on a run in this state.
  const isWorking = (state) => state === "running" || state === "verifying";
  return {say, ask, follow, age, ratio, tag, isWorking};
})();
