"""A table that draws only the lines on screen.

Textual's own ``DataTable`` repaints its viewport for one changed cell and needs seconds to refill 10,000 rows. This one
is a ``ScrollView`` with the line API: a refresh costs the visible lines, whatever the number of rows.
Every cell is ``rich.text.Text``, so foreign strings are never read as markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip


@dataclass(frozen=True)
class Column:
    """A column: ``width`` in cells; one column with ``grow`` takes what is left; low ``priority`` hides first."""

    key: str
    title: str
    width: int
    align: str = "left"
    grow: bool = False
    priority: int = 0


@dataclass(frozen=True)
class Row:
    """A row: an id that keeps the cursor on it across refreshes, and one text per column key."""

    id: str
    cells: dict[str, Text]
    dim: bool = False


def fit_columns(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """Which columns fit into ``width`` cells, and how wide each is; the least important ones go first."""
    kept = list(columns)
    while len(kept) > 1 and sum(c.width + 1 for c in kept) > width:
        kept.remove(max(kept, key=lambda c: (c.priority, columns.index(c))))
    spare = max(0, width - sum(c.width + 1 for c in kept))
    return [(c, c.width + (spare if c.grow else 0)) for c in kept]


class LineTable(ScrollView, can_focus=True):
    """A read-only table with a row cursor.

    Rows are replaced whole with :meth:`show`; the cursor follows the row's id.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "jump(0)", "Top", show=False),
        Binding("end,G", "jump(-1)", "Bottom", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"line-table--head", "line-table--cursor", "line-table--dim"}
    DEFAULT_CSS = """
    LineTable { height: 1fr; background: $surface; }
    LineTable > .line-table--head { text-style: bold; color: $text-muted; background: $panel; }
    LineTable > .line-table--cursor { background: $primary-darken-3; text-style: bold; }
    LineTable > .line-table--dim { color: $text-muted; }
    """

    class Highlighted(Message):
        """The cursor moved to another row."""

        def __init__(self, row_id: str | None) -> None:
            super().__init__()
            self.row_id = row_id

    def __init__(self, columns: Sequence[Column], *, empty: str = "", id: str | None = None) -> None:
        super().__init__(id=id)
        self.columns = list(columns)
        self.rows: Sequence[Row] = ()
        self.empty = empty
        self.cursor = 0

    @property
    def cursor_id(self) -> str | None:
        """Id of the row under the cursor."""
        return self.rows[self.cursor].id if self.rows else None

    def show(self, rows: Sequence[Row]) -> None:
        """Replaces the rows and keeps the cursor on the row that it was on."""
        before = self.cursor_id
        self.rows = rows
        place = next((i for i, row in enumerate(rows) if row.id == before), None)
        self.cursor = place if place is not None else max(0, min(self.cursor, len(rows) - 1))
        self.virtual_size = Size(0, len(rows) + 1)
        self.refresh()
        if self.cursor_id != before:
            self.post_message(self.Highlighted(self.cursor_id))

    def render_line(self, y: int) -> Strip:
        """One visible line: the head stays on top, rows scroll beneath it."""
        width = self.scrollable_content_region.width
        fitted = fit_columns(self.columns, width)
        if y == 0:
            style = self.get_component_rich_style("line-table--head")
            return self._line([(Text(c.title), c, w) for c, w in fitted], style, width)
        index = y - 1 + self.scroll_offset.y
        base = self.rich_style
        if not self.rows and y == 2 and self.empty:
            text = Text(f"  {self.empty}")
            return Strip(list(text.render(self.app.console)), text.cell_len).adjust_cell_length(width, base)
        if index >= len(self.rows):
            return Strip.blank(width, base)
        row = self.rows[index]
        style = base
        if row.dim:
            style += self.get_component_rich_style("line-table--dim", partial=True)
        if index == self.cursor and self.has_focus:
            style += self.get_component_rich_style("line-table--cursor", partial=True)
        return self._line([(row.cells.get(c.key, Text()), c, w) for c, w in fitted], style, width)

    def _line(self, cells: list[tuple[Text, Column, int]], style: Style, width: int) -> Strip:
        segments: list[Segment] = []
        for text, column, size in cells:
            cell = text.copy()
            cell.truncate(size, overflow="ellipsis")
            cell.align("right" if column.align == "right" else "left", size)
            cell.append(" ")
            cell.end = ""
            segments.extend(cell.render(self.app.console))
        return Strip(segments).apply_style(style).adjust_cell_length(width, style)

    def action_move(self, by: int) -> None:
        """Moves the cursor by some rows."""
        self._go(self.cursor + by)

    def action_page(self, by: int) -> None:
        """Moves the cursor by screenfuls."""
        self._go(self.cursor + by * max(1, self.scrollable_content_region.height - 2))

    def action_jump(self, to: int) -> None:
        """Moves the cursor to the first (0) or last (-1) row."""
        self._go(0 if to == 0 else len(self.rows) - 1)

    def _go(self, index: int) -> None:
        if not self.rows:
            return
        self.cursor = max(0, min(index, len(self.rows) - 1))
        self.scroll_to_region(Region(0, self.cursor, 1, 2), animate=False, force=True)
        self.refresh()
        self.post_message(self.Highlighted(self.cursor_id))
