"""Draw which rank takes which span of the token stream in one optimizer step."""

from argparse import ArgumentParser
from pathlib import Path

WIDTH, HEIGHT = 936, 322
BLUE, RED, GRAY = "#1667b7", "#c4420f", "#555555"
CELL, ROW = 44, 26  # width and height of a slot
SLOTS = 8
BOXES = (
    (BLUE, "each micro-step: loss × 1/grad_accum_steps, backward; gradients add up on each rank"),
    (RED, "the last (framed): require_backward_grad_sync; one exchange averages over the ranks"),
    (BLUE, "then Muon for matrices, Adam for the rest: the same new weights on every rank"),
)


def text(x: float, y: float, words: str, color: str = "black", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {style}/>'


def slot(x: float, y: float, number: int, width: float = CELL) -> list[str]:
    """A span of the stream; the later, the darker."""
    style = f'fill="{BLUE}" fill-opacity="{0.1 + 0.08 * number:.2f}" stroke="white"'
    return [box(x, y, width, ROW, style), text(x + width / 2, y + 18, str(number))]


def panel(left: float, top: float, ranks: int) -> list[str]:
    """The slots of each rank, a column for each micro-step."""
    steps = SLOTS // ranks
    title = f"{ranks} rank{'s'[: ranks > 1]} × {steps}{' micro-steps' * (steps > 2)}"
    parts = [text(left, top - 10, title, anchor="start")]
    for rank in range(ranks):
        y = top + rank * ROW
        parts.append(text(left + 46, y + 18, f"rank {rank}", GRAY, "end"))
        for micro_step in range(steps):
            parts += slot(left + 52 + micro_step * CELL, y, micro_step * ranks + rank)
    style = f'fill="none" stroke="{RED}" stroke-width="2.5"'
    return [*parts, box(left + 52 + (steps - 1) * CELL, top, CELL, ranks * ROW, style)]


def draw() -> str:
    """Return the SVG, on white, so that it can be read on a dark page, too."""
    parts = [box(0, 0, WIDTH, HEIGHT, 'fill="white" rx="6"')]
    parts.append(text(14, 34, "the token stream: a step reads eight spans", anchor="start"))
    for number in range(SLOTS):
        parts += slot(360 + number * 66, 16, number, width=66)
    parts += [text(346, 34, "…", GRAY), text(360 + SLOTS * 66 + 14, 34, "…", GRAY)]
    parts.append(text(66, 138, "time →", GRAY, "start"))
    left = 14
    for ranks in (1, 2, 4, 8):
        parts += panel(left, 94, ranks)
        left += 52 + SLOTS // ranks * CELL + 14
    for row, (color, words) in enumerate(BOXES):
        y = 168 + 50 * row
        parts.append(box(14, y, 632, 34, f'fill="none" stroke="{color}" rx="6"'))
        parts.append(text(330, y + 22, words))
        parts += [text(330, y - 4, "↓", GRAY)] if row > 0 else []
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        ' font-family="DejaVu Sans, Arial, sans-serif" font-size="14">'
    )
    return "\n".join([head, *parts, "</svg>\n"])


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="the .svg to write")
    parser.parse_args().picture.write_text(draw(), encoding="utf-8")
