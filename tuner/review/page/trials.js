"use strict";
// The table of all trials: sort, filter, download. Only the rows in view are in the document, so
// that 10,000 trials scroll as well as ten; all of them are on paper, up to a limit.

function trialTable(pick) {
  const MAX_PRINTED = 2000, AROUND = 12, MAX_CHARS = 34, MAX_WORDS = 70;
  const table = document.getElementById("trials"), box = document.getElementById("trials-box");
  const [head, body] = [table.tHead.rows[0], table.tBodies[0]];
  const filter = document.getElementById("filter"), status = document.getElementById("status");
  const shown = document.getElementById("shown");
  let columns = [], texts = [], rows = [], sort = null, only = null, winner = null, chosen = null;
  let hovers = new Map(), rowOfTrial = new Map(), unknown = [];
  let rowHeight = 29, csvName = "trials.csv", isPrinting = false;

  const formats = {
    count: (v) => String(v),
    number: (v) => String(v),
    us: (v) => v >= 100 ? v.toFixed(1) : v.toFixed(3),
    percent: (v) => `${Number((100 * v).toPrecision(2))} %`,
    ratio: (v) => v.toFixed(3),
    error: (v) => v.toExponential(2),
    bytes: (v) => v.toLocaleString("en-US"),
    seconds: (v) => v.toFixed(v < 10 ? 3 : 1),
    word: (v) => v === true ? "True" : v === false ? "False" : String(v),
  };
  const shownAs = (column, row) => {
    const value = column.values[row];
    return value === null || value === undefined ? "–" : formats[column.kind](value);
  };
  const isNumber = (column) => column.kind !== "word";

  // ---- which rows, in which order
  function tests() {
    const found = [];
    unknown = [];
    for (const term of filter.value.trim().split(/\s+/).filter(Boolean)) {
      const match = /^(.+?)(!=|<=|>=|=|<|>)(.*)$/.exec(term);
      const column = match && columns.find((c) => c.name === match[1] || c.label === match[1]);
      if (column) found.push(compared(column, match[2], match[3]));
      else {
        if (match) unknown.push(match[1]);
        found.push((row) => textOf(row).includes(term.toLowerCase()));
      }
    }
    if (status.value) {
      const column = columns.find((c) => c.name === "status");
      found.push((row) => column.values[row] === status.value);
    }
    if (only) found.push((row) => only.has(columns[0].values[row]));
    return found;
  }
  function compared(column, sign, word) {
    const wanted = Number(word);
    return (row) => {
      const value = column.values[row];
      const isNumeric = typeof value === "number" && word !== "" && !Number.isNaN(wanted);
      const same = isNumeric ? value === wanted
        : shownAs(column, row).toLowerCase() === word.toLowerCase();
      if (sign === "=" || sign === "!=") return same === (sign === "=");
      if (!isNumeric) return false;
      return {"<": value < wanted, ">": value > wanted, "<=": value <= wanted, ">=": value >= wanted}[sign];
    };
  }
  function textOf(row) {
    texts[row] ??= columns.map((c) => shownAs(c, row)).join("\n").toLowerCase();
    return texts[row];
  }
  function wrapped(text, most) {
    const COLUMNS = 60, lines = [];
    let line = "";
    for (const word of text.split(/\s+/)) {
      if (line && line.length + word.length >= COLUMNS) {
        lines.push(line);
        line = "";
      }
      line = line ? `${line} ${word}` : word.slice(0, 2 * COLUMNS);
    }
    lines.push(line);
    return lines.length <= most ? lines : [...lines.slice(0, most), "..."];
  }
  function choose() {
    const wanted = tests(), count = columns.length ? columns[0].values.length : 0;
    rows = [];
    for (let row = 0; row < count; row += 1) if (wanted.every((test) => test(row))) rows.push(row);
    const column = sort && columns.find((c) => c.name === sort.name);
    if (column) {
      const sign = sort.isUp ? 1 : -1, {values} = column;
      rows.sort((a, b) => {
        const [left, right] = [values[a], values[b]];
        if (left === null || right === null) return (left === null) - (right === null) || a - b;
        const order = isNumber(column) ? left - right
          : String(left).localeCompare(String(right), "en", {numeric: true});
        return sign * order || a - b;
      });
    }
    const brushed = (only ? ", brushed ones only" : "")
      + (rows.length || !unknown.length ? "" : `: no column is called ${unknown.join(", ")}`);
    shown.textContent = `${rows.length.toLocaleString("en-US")} of ${count.toLocaleString("en-US")} shown${brushed}`;
    render();
  }

  // ---- what is in the document
  function render() {
    const heightAbove = table.caption.offsetHeight + table.tHead.offsetHeight;
    let first = Math.max(0, Math.floor((box.scrollTop - heightAbove) / rowHeight) - AROUND);
    let last = Math.min(rows.length, first + Math.ceil(box.clientHeight / rowHeight) + 2 * AROUND + 2);
    if (isPrinting) [first, last] = [0, Math.min(rows.length, MAX_PRINTED)];
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.trial : null;
    body.replaceChildren(space(first), ...rows.slice(first, last).map((row, i) => rowOf(row, first + i)),
      space(isPrinting ? 0 : rows.length - last));
    table.setAttribute("aria-rowcount", rows.length + 1);
    if (focused) body.querySelector(`[data-trial="${focused}"]`)?.focus({preventScroll: true});
  }
  function space(count) {
    const made = document.createElement("tr"), cell = document.createElement("td");
    made.className = "space";
    made.setAttribute("aria-hidden", "true");
    made.hidden = !count;
    cell.colSpan = Math.max(1, columns.length);
    cell.style.height = `${count * rowHeight}px`;
    made.append(cell);
    return made;
  }
  function rowOf(row, place) {
    const made = document.createElement("tr"), number = columns[0].values[row];
    made.setAttribute("aria-rowindex", place + 2);
    made.classList.toggle("winner", number === winner);
    made.classList.toggle("chosen", number === chosen);
    columns.forEach((column, index) => {
      const cell = document.createElement("td"), text = shownAs(column, row);
      if (isNumber(column)) cell.className = "number";
      if (index) {
        cell.textContent = text;
        if (text.length > 20) cell.title = text;
      } else {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = text;
        button.dataset.trial = text;
        button.setAttribute("aria-label", `Show trial ${text}`);
        button.addEventListener("click", () => pick(number));
        cell.append(button);
      }
      made.append(cell);
    });
    return made;
  }
  function headings() {
    const old = [...head.cells].map((cell) => cell.dataset.name).join();
    if (old === columns.map((c) => c.name).join()) return;
    head.replaceChildren(...columns.map((column) => {
      const cell = document.createElement("th"), button = document.createElement("button");
      cell.scope = "col";
      cell.dataset.name = column.name;
      cell.title = column.name;
      if (isNumber(column)) cell.className = "number";
      button.type = "button";
      button.textContent = column.label;
      button.addEventListener("click", () => sortBy(column.name));
      cell.append(button);
      return cell;
    }));
    document.getElementById("column-names").textContent =
      `Columns: ${columns.map((c) => c.name).join(", ")}.`;
  }
  function widths() {
    const group = table.querySelector("colgroup") ?? document.createElement("colgroup");
    const chars = columns.map((column) => {
      let most = column.label.length + 3;
      const step = Math.max(1, Math.floor(column.values.length / 500));
      for (let row = 0; row < column.values.length; row += step) {
        most = Math.max(most, shownAs(column, row).length);
      }
      return Math.min(most, column.name === "reason" ? MAX_WORDS : MAX_CHARS);
    });
    group.replaceChildren(...chars.map((count) => {
      const made = document.createElement("col");
      made.style.width = `calc(${count}ch + 1.5rem)`;
      return made;
    }));
    table.caption.after(group);
    table.style.width = `calc(${chars.reduce((a, b) => a + b, 0)}ch + ${1.5 * chars.length}rem)`;
  }
  function sortBy(name) {
    sort = {name, isUp: sort?.name !== name || !sort.isUp};
    for (const cell of head.cells) {
      if (cell.dataset.name === name) cell.setAttribute("aria-sort", sort.isUp ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    }
    choose();
  }

  // ---- download
  function field(column, row) {
    const value = column.values[row];
    if (value === null || value === undefined) return "";
    let text = isNumber(column) ? String(value) : formats.word(value);
    // A spreadsheet would run a text that begins like a formula.
    if (!isNumber(column) && /^[=+\-@\t]/.test(text)) text = "'" + text;
    return quoted(text);
  }
  const quoted = (text) => /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  function download() {
    const lines = [columns.map((c) => quoted(c.name)).join(",")];
    for (const row of rows) lines.push(columns.map((c) => field(c, row)).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], {type: "text/csv"}));
    link.download = csvName;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  filter.addEventListener("input", choose);
  status.addEventListener("change", choose);
  document.getElementById("csv").addEventListener("click", download);
  let isWaiting = false;
  box.addEventListener("scroll", () => {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => { isWaiting = false; render(); });
  });

  return {
    show(data) {
      [columns, winner, csvName, texts] = [data.columns, data.winner, data.csv_name, []];
      hovers = new Map();
      rowOfTrial = new Map(columns[0].values.map((number, row) => [number, row]));
      headings();
      widths();
      choose();
      const height = body.rows[1]?.offsetHeight;
      if (height && height !== rowHeight) { rowHeight = height; render(); }
    },
    keepOnly(numbers) {
      only = numbers && new Set(numbers);
      choose();
    },
    mark(number) {
      chosen = number;
      render();
    },
    // A trial's button in the table, or the table where its row is out of view.
    focusOn(number) {
      (body.querySelector(`[data-trial="${number}"]`) ?? box).focus({preventScroll: true});
    },
    printing(is) {
      isPrinting = is;
      render();
    },
    // One trial in a few lines, for a figure; escaped, since Plotly reads a little HTML.
    hoverOf(number) {
      const known = hovers.get(number);
      if (known) return known;
      const row = rowOfTrial.get(number), at = (name) => columns.find((c) => c.name === name);
      const [latency, noise, reason] = [at("latency_us"), at("noise"), at("reason")];
      let head = `trial ${number}: ${shownAs(at("status"), row)}`;
      if (latency.values[row] !== null) head += `, ${shownAs(latency, row)} µs ± ${shownAs(noise, row)}`;
      const params = columns.filter((c) => c.is_parameter && c.values[row] !== null)
        .map((c) => `${c.label}=${shownAs(c, row)}`).join(" ");
      const lines = [head, ...wrapped(params, 12)];
      if (reason.values[row]) lines.push(...wrapped(reason.values[row], 3));
      const text = lines.map((line) => line.replace(/[&<>]/g, (c) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;"}[c]))).join("<br>");
      hovers.set(number, text);
      return text;
    },
    // One trial as pairs of label and text.
    factsOf(number) {
      const row = rowOfTrial.get(number);
      return columns.slice(1).filter((c) => (c.values[row] ?? null) !== null)
        .map((c) => [c.label, shownAs(c, row)]);
    },
    byLatency() {
      const times = columns.find((c) => c.name === "latency_us").values;
      const order = times.map((_, row) => row);
      order.sort((a, b) => (times[a] ?? Infinity) - (times[b] ?? Infinity) || a - b);
      const template = columns.find((c) => c.label === "template");
      return order.map((row) => ({
        number: columns[0].values[row],
        text: `trial ${columns[0].values[row]}: ${times[row] === null ? shownAs(columns[1], row)
          : `${shownAs(columns[2], row)} µs`}, ${shownAs(template, row)}`,
      }));
    },
  };
}
