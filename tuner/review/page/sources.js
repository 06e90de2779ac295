"use strict";
// The winner's source against any other trial's: unpacked and compared on demand.

// Sources packed into the page: each distinct line once, a source is a list of line numbers.
function packedSources(text) {
  let unpacked = null;
  const all = () => {
    unpacked ??= (async () => {
      const bytes = Uint8Array.from(atob(text), (c) => c.codePointAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return new Response(stream).json();
    })();
    return unpacked;
  };
  return async (number) => {
    const {lines, sources, trials} = await all();
    return number in trials ? sources[trials[number]].map((line) => lines[line]) : null;
  };
}

// Myers, "An O(ND) Difference Algorithm", 1986: pairs of a sign and a line. What differs in more
// than MOST lines is shown as replaced whole.
function differences(before, after) {
  const MOST = 3000;
  let start = 0, end = 0;
  const least = Math.min(before.length, after.length);
  while (start < least && before[start] === after[start]) start += 1;
  while (end < least - start && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const [a, b] = [before.slice(start, before.length - end), after.slice(start, after.length - end)];
  const middle = shortest(a, b, MOST)
    ?? [...a.map((line) => ["-", line]), ...b.map((line) => ["+", line])];
  const same = (line) => [" ", line];
  return [...before.slice(0, start).map(same), ...middle, ...before.slice(before.length - end).map(same)];
}
function shortest(a, b, most) {
  const size = a.length + b.length, limit = Math.min(size, most), trace = [];
  const reach = new Int32Array(2 * limit + 3), zero = limit + 1;
  for (let d = 0; d <= limit; d += 1) {
    trace.push(reach.slice(zero - d - 1, zero + d + 2));
    for (let k = -d; k <= d; k += 2) {
      const isDown = k === -d || (k !== d && reach[zero + k - 1] < reach[zero + k + 1]);
      let x = isDown ? reach[zero + k + 1] : reach[zero + k - 1] + 1, y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) [x, y] = [x + 1, y + 1];
      reach[zero + k] = x;
      if (x >= a.length && y >= b.length) return walkedBack(a, b, trace);
    }
  }
  return null;
}
function walkedBack(a, b, trace) {
  const found = [];
  let [x, y] = [a.length, b.length];
  for (let d = trace.length - 1; d >= 0; d -= 1) {
    const reach = trace[d], at = (k) => reach[k + d + 1], k = x - y;
    const isDown = k === -d || (k !== d && at(k - 1) < at(k + 1));
    const [fromX, fromK] = isDown ? [at(k + 1), k + 1] : [at(k - 1), k - 1];
    const fromY = fromX - fromK;
    while (x > fromX && y > fromY && x > 0 && y > 0) {
      [x, y] = [x - 1, y - 1];
      found.push([" ", a[x]]);
    }
    if (d > 0) found.push(isDown ? ["+", b[fromY]] : ["-", a[fromX]]);
    [x, y] = [fromX, fromY];
  }
  return found.reverse();
}

function sourceView(linesOf) {
  const AROUND = 3, MAX_OPTIONS = 2000;
  const other = document.getElementById("other"), box = document.getElementById("diff");
  const compared = document.getElementById("compared");
  let winner = null, options = "";

  function option(number, text) {
    const made = document.createElement("option");
    [made.value, made.textContent] = [number, text];
    return made;
  }
  function row(kind, text) {
    const made = document.createElement("span");
    if (kind) made.className = kind;
    made.textContent = text + "\n";
    return made;
  }
  async function compare() {
    const wanted = other.value;
    if (wanted === "" || winner === null) {
      box.hidden = true;
      compared.textContent = "";
      return;
    }
    const [before, after] = await Promise.all([linesOf(winner), linesOf(Number(wanted))]);
    if (wanted !== other.value) return;  // another was chosen meanwhile
    box.hidden = !before || !after;
    if (box.hidden) {
      compared.textContent = `No source is kept of trial ${before ? wanted : winner}.`;
      return;
    }
    const found = differences(before, after);
    const count = (sign) => found.filter(([kind]) => kind === sign).length;
    const [fewer, more] = [count("-"), count("+")];
    compared.textContent = fewer + more
      ? `${fewer} ${fewer === 1 ? "line" : "lines"} of trial ${winner} replaced by ${more} of trial ${wanted}.`
      : `Trial ${wanted} has the same text as trial ${winner}.`;
    const made = document.createElement("pre");
    made.append(...rows(found, wanted));
    box.replaceChildren(made);
    box.hidden = !(fewer + more);
  }
  function rows(found, wanted) {
    const near = new Set();
    found.forEach(([kind], i) => {
      if (kind !== " ") for (let j = i - AROUND; j <= i + AROUND; j += 1) near.add(j);
    });
    const made = [row("gd", `--- trial ${winner}`), row("gi", `+++ trial ${wanted}`)];
    let [left, right, isGap] = [0, 0, true];
    found.forEach(([kind, line], i) => {
      if (near.has(i)) {
        if (isGap) made.push(row("gu", `@@ line ${left + 1} / line ${right + 1} @@`));
        made.push(row({"-": "gd", "+": "gi"}[kind], kind + line));
      }
      isGap = !near.has(i);
      left += kind !== "+";
      right += kind !== "-";
    });
    return made;
  }
  other.addEventListener("change", compare);
  return {
    show(data, trials) {
      const others = trials.filter((trial) => trial.number !== data.winner).slice(0, MAX_OPTIONS);
      const key = JSON.stringify([data.winner, others]), isNew = winner !== data.winner;
      winner = data.winner;
      if (key === options) return;
      options = key;
      const before = other.value;
      other.replaceChildren(option("", winner === null ? "no correct trial" : "choose a trial"),
        ...others.map((trial) => option(trial.number, trial.text)));
      other.value = before;
      if (other.value !== before) other.value = "";
      if (isNew) compare();
    },
    async compareWith(number) {
      if (![...other.options].some((made) => made.value === String(number))) {
        other.append(option(number, `trial ${number}`));
      }
      other.value = number;
      await compare();
      document.getElementById("compare").scrollIntoView();
      other.focus({preventScroll: true});
    },
  };
}
