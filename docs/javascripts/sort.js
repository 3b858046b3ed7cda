// Tables inside <div class="sorted"> are sorted by the column whose heading is clicked: numbers by value, with their
// units, others by text. A second click turns the order around.
const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };

// "−2.13 (−2.93 to −1.33)" is −2.13, "10.3 kB" 10300, "1,136×" 1136; what is no number comes last.
function valueOf(text) {
  const found = /^([-+−]?[\d.,]+(?:e[-+]?\d+)?)(?:\s*([kMG]?B)\b)?/.exec(text.trim());
  return found ? Number(found[1].replace("−", "-").replaceAll(",", "")) * (UNITS[found[2]] ?? 1) : NaN;
}

function compare(one, other) {
  const [a, b] = [valueOf(one), valueOf(other)];
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b) || one.localeCompare(other);
  return a - b;
}

function sortBy(table, column, heading) {
  const order = heading.getAttribute("aria-sort") === "descending" ? 1 : column === 0 && !heading.ariaSort ? 1 : -1;
  const rows = [...table.tBodies[0].rows];
  const text = (row) => row.cells[column].textContent;
  const known = (row) => column === 0 || !Number.isNaN(valueOf(text(row)));
  rows.sort((a, b) => known(b) - known(a) || order * compare(text(a), text(b)));
  table.tBodies[0].append(...rows);
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order === 1 ? "ascending" : "descending");
}

for (const table of document.querySelectorAll(".sorted table")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, column, heading));
    heading.append(button);
  });
}
