// Tables on the page whose first column is "method" are sorted by a click, or Enter, on a header.
document$.subscribe(() => {
  for (const table of document.querySelectorAll("article table")) {
    const heads = [...table.querySelectorAll("th")];
    if (heads[0]?.textContent !== "method") continue;
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") === "descending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const text = (row) => row.cells[column].textContent;
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [parseFloat(text(a)), parseFloat(text(b))];
          if (isNaN(x) !== isNaN(y)) return isNaN(x) - isNaN(y); // what is no number comes last
          return (up ? 1 : -1) * (isNaN(x) ? text(a).localeCompare(text(b)) : x - y);
        });
        body.append(...rows);
      });
    });
  }
});
