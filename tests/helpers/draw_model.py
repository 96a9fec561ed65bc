"""Draw the model for README.md: the demo's four blocks, and the inside of one.

python tests/helpers/draw_model.py tests/pictures/model.svg"""

import sys
from pathlib import Path

BLUE, RED, GREEN, GRAY = "#1667b7", "#c4420f", "#2b8a3e", "#555555"
BOXES = [  # left edge, center, width, lines of text
    (76, 104, 66, "embed;", "norm"), (160, 104, 90, "block 0"), (300, 104, 90, "block 1"),
    (490, 104, 90, "block 2"), (640, 104, 90, "block 3"),
    (752, 104, 96, "norm;", "embedding", "as output;", "softcap"),
    (70, 272, 102, "resid_mix:", "a x + b x0"),
    (222, 352, 290, "attention: norm; c_q, c_k, c_v;", "norm, rotate q and k; q × gain;",
     "causal softmax; proj;", "× attn_scale"),
    (598, 352, 250, "MLP: norm; fc;", "squared ReLU;", "proj;", "× mlp_scale"),
]  # fmt: skip
ARROWS = {  # SVG paths, each with a head at its end
    BLUE: [
        "60 104 H 76", "142 104 H 160", "250 104 H 300", "390 104 H 438", "456 104 H 490",
        "580 104 H 598", "616 104 H 640", "730 104 H 752", "848 104 H 864",  # the whole model
        "32 272 H 70", "172 272 H 531", "196 272 V 352 H 222", "512 352 H 540 V 281",
        "549 272 H 867", "572 272 V 352 H 598", "848 352 H 876 V 281", "885 272 H 906",  # a block
    ],
    RED: [*(f"151 104 V 40 H {x} V 88" for x in (205, 345, 535, 685)), "121 232 V 248"],
    GREEN: ["415 104 V 146 H 447 V 113", "275 104 V 172 H 607 V 113"],
}  # fmt: skip
SUMS = [(447, 104), (607, 104), (540, 272), (876, 272)]
TEXTS = [
    (10, 100, "tokens", "black"), (10, 119, "(B, T)", GRAY),
    (868, 100, "logits", "black"), (868, 119, "(B, T, V)", GRAY),
    (160, 30, "x0, the normed embedding, enters every block", RED),
    (207, 192, "skips: the second half adds the outputs of the first (× skip_weights), last in, "
     "first out", GREEN),
    (14, 224, "Inside a block:", "black"), (128, 240, "x0", RED),
    (16, 277, "x", "black"), (912, 277, "x", "black"), (331, 262, "(B, T, D)", GRAY),
    (170, 414, "q: (B, T, H, h); k, v: (B, T, K, h), each for H / K query heads", GRAY),
    (659, 414, "hidden: (B, T, 2 D)", GRAY),
    (14, 444, "B sequences of T tokens; D width; H query heads and K key/value heads of width "
     "h = D / H; V vocabulary.", GRAY),
    (14, 464, "The demo: 4 blocks, T = 128, D = 128, H = 2, K = 1, V = 1,024. "
     "The default: 9, 1,024, 512, 8, 4, 1,024.", GRAY),
]  # fmt: skip


def draw() -> list[str]:
    size = 'width="936" height="480"'
    font = 'font-family="DejaVu Sans, Arial, sans-serif" font-size="14"'
    page = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 936 480" {size} {font}>']
    page.append(f'<rect {size} rx="6" fill="white"/>')
    for color, paths in ARROWS.items():
        box = 'markerWidth="8" markerHeight="8" refX="8" refY="4" orient="auto"'
        head = f'<path d="M 0 0 L 8 4 L 0 8 Z" fill="{color}"/>'
        name = color.removeprefix("#")
        page.append(f'<marker id="{name}" markerUnits="userSpaceOnUse" {box}>{head}</marker>')
        style = f'fill="none" stroke="{color}" stroke-width="1.5" marker-end="url(#{name})"'
        page += [f'<path d="M {path}" {style}/>' for path in paths]
    for x, y in SUMS:
        page.append(f'<circle cx="{x}" cy="{y}" r="9" fill="white" stroke="{BLUE}"/>')
        page.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle">+</text>')
    for x, y, width, *lines in BOXES:
        top = y - 9 * len(lines) - 7
        shape = f'x="{x}" y="{top}" width="{width}" height="{18 * len(lines) + 14}" rx="6"'
        page.append(f'<rect {shape} fill="#e8f0f8" stroke="{BLUE}"/>')
        for row, line in enumerate(lines):
            place = f'x="{x + width // 2}" y="{top + 18 * row + 20}" text-anchor="middle"'
            page.append(f"<text {place}>{line}</text>")
    page += [f'<text x="{x}" y="{y}" fill="{color}">{line}</text>' for x, y, line, color in TEXTS]
    return [*page, "</svg>\n"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(draw()), encoding="utf-8")
