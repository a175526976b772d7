"""What tests of web pages measure in the system's chromium."""

# The contrast between each text and the background of the page.
CONTRASTS = """
() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = color => color.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const paper = luminance(numbers(getComputedStyle(document.body).backgroundColor));
  return [...document.querySelectorAll('h1, h2, h3, p, figcaption, caption, th, td, code, svg text')].map(element => {
    const style = getComputedStyle(element);
    const ink = luminance(numbers(element instanceof SVGElement ? style.fill : style.color));
    return (Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05);
  });
}
"""


def check_contrast(page):
    """Check that all texts of a page stand out from their background: on light and dark screens, and in print."""
    papers = []
    for media in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {"media": "print"}):
        page.emulate_media(**media)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert min(contrasts) >= 4.5, media
        papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers == ["rgb(255, 255, 255)", "rgb(21, 24, 28)", "rgb(255, 255, 255)"]
