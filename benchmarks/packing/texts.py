# SPDX-License-Identifier: Apache-2.0
"""What a model reads: prose, code, a chat and another language, from this repository alone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_GERMAN = """
Am Morgen lag dichter Nebel über dem Hafen, und die Fischer warteten, bis die Glocke der kleinen
Kirche sieben schlug. Erst dann lösten sie die Leinen, prüften noch einmal die Netze und fuhren
hinaus, einer hinter dem anderen, so wie es ihre Väter getan hatten. Wer zuletzt kam, musste am
Abend die Kisten tragen; darüber wurde nie gestritten. Die Frauen öffneten unterdessen die Läden am
Markt, und bald roch es in allen Gassen nach frischem Brot, nach Kaffee und nach dem Rauch der
Räucherkammern. Gegen zehn Uhr kam die Postkutsche, später ein Lastwagen, der Briefe, Zeitungen und
manchmal auch einen Fremden brachte. Der alte Lehrer, der seit vierzig Jahren im gelben Haus
wohnte, führte ein Tagebuch über das Wetter. Er schrieb auf, wie hoch das Wasser stand, woher der
Wind kam und wie viele Boote zurückkehrten. Niemand las es, doch als im Winter die große Flut kam,
wusste er als Einziger, welche Häuser trocken bleiben würden, und man trug die Kinder und die
Kranken dorthin. Nach der Flut wurde ein Damm gebaut. Die Arbeit dauerte drei Sommer, und jede
Familie gab dafür, was sie konnte: Holz, Steine, Pferde oder einfach zwei Hände. Als der letzte
Stein gesetzt war, feierte man eine Woche lang. Seitdem erzählt man den Kindern, dass das Meer den
Damm nur duldet, weil es die Musik jener Woche nicht vergessen hat. Ein Ingenieur aus der
Hauptstadt, der den Damm Jahre später untersuchte, fand eine andere Erklärung: Die Steine seien so
verlegt, dass jede Welle die nächste bremse. Beide Erklärungen stehen heute nebeneinander auf der
Tafel am Eingang des Hafens, und die meisten Besucher fotografieren die erste. Im Frühling, wenn
die Nächte kürzer werden, sitzen die Leute lange vor den Häusern. Sie reden über den Preis der
Heringe, über neue Motoren und darüber, ob die Schule wieder einen zweiten Lehrer bekommt. Manchmal
liest jemand aus dem Tagebuch vor, das jetzt im Rathaus liegt, und dann wird es still, denn in den
kurzen Sätzen über Wind und Wasser erkennt jeder einen Tag wieder, an dem er selbst draußen war.
"""
_FRENCH = """
La bibliothèque du quartier occupait autrefois une gare, et l'on voyait encore, sous la verrière,
la grande horloge dont les aiguilles s'étaient arrêtées à midi moins cinq. Personne n'avait jamais
voulu la réparer, car les lecteurs prétendaient qu'ils y gagnaient du temps. Au rez-de-chaussée, là
où passaient les voies, de longues tables recevaient les étudiants ; à l'étage, dans les bureaux
des chefs de gare, on gardait les cartes anciennes et les journaux. La directrice connaissait
chaque visiteur par son nom et par ses habitudes. Elle savait que le boulanger, qui se levait à
trois heures, venait l'après-midi lire des récits de voyage et s'endormait régulièrement au
troisième chapitre. Elle savait aussi que la petite fille au manteau rouge empruntait toujours deux
livres : un pour elle, et un autre pour sa grand-mère, qui ne pouvait plus descendre l'escalier. Un
hiver, la mairie annonça que le bâtiment serait vendu. On organisa des réunions, on écrivit des
lettres, on chanta même devant la préfecture. Finalement, ce fut un ancien cheminot qui trouva la
solution : dans un carton de la réserve il découvrit un contrat, signé cent ans plus tôt, selon
lequel la gare devait rester ouverte au public aussi longtemps que l'horloge indiquerait l'heure.
Les avocats discutèrent pendant des mois pour savoir si une horloge arrêtée indiquait quelque
chose. Le juge, qui aimait les livres, répondit qu'elle donnait l'heure exacte deux fois par jour,
et que cela suffisait. Depuis cette décision, une plaque de cuivre rappelle l'affaire, et le
premier dimanche de chaque mois les habitants se retrouvent à midi moins cinq sous la verrière pour
écouter une lecture.
"""


def texts() -> dict[str, str]:
    """By name. Each has more than 2,048 tokens of an English model if there are as many words."""
    pages = sorted((ROOT / "docs" / "guides").glob("*.md"))
    prose = "\n".join(page.read_text() for page in pages)
    modules = sorted((ROOT / "lmcache_redis" / "resp").glob("*.py"))
    code = "\n".join(module.read_text() for module in modules)
    return {
        "prose": prose,
        "code": code,
        "chat": _chat(prose),
        "german": _GERMAN + _FRENCH + _GERMAN,
    }


def _chat(prose: str) -> str:
    """Each section as the answer to a question, in the words of SmolLM2's template."""
    turns = []
    for heading, section in re.findall(r"^#+ (.+)\n((?:(?!#).*\n)+)", prose, re.MULTILINE):
        turns.append(f"<|im_start|>user\nTell me more: {heading.lower()}?<|im_end|>\n")
        turns.append(f"<|im_start|>assistant\n{section.strip()}<|im_end|>\n")
    return "".join(turns)
