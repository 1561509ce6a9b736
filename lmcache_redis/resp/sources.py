# SPDX-License-Identifier: Apache-2.0
"""Whom to ask where the data is, and whom to believe. Pure: no clock, no network.

Sources are Sentinels, or nodes of a cluster. A round asks one after another until it is settled. As
a rule one source is asked, at random, and kept for a while. A round that is in doubt asks up to
`PANEL`: a server is down, refuses writes, or says CLUSTERDOWN, so the map may be outdated, and so
may be who told it.

- Who brought no news while they were wanted is asked again after the others, as is who failed.
- Of answers in a round, those count of sources that are sure themselves; of these those with the
  greatest epoch; of these what most of them say.
- A newer epoch is believed at once. An older one takes the place of a newer one only if every
  source has been asked and none knows the newer one any more. Who does not answer may know it:
  only if the map does not work is silence enough.
- Of the same epoch (addresses change, slots move) another map is believed if its source is the one
  that had named the last map, or keys were redirected, or most say so. While the map does not work
  half of them are enough.
- During a failover a node may not know who has some slots. Then others are asked as well, and of
  maps of one epoch one with fewer such slots is believed.
- A cluster's seeds are asked when none of its nodes has answered.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lmcache_redis.resp.maps import Answer, ServerMap
from lmcache_redis.resp.net.endpoint import Endpoint

# Sources that a round asks at most, and whose connections are kept.
PANEL = 3
# The rounds without doubt, about, after which another source is asked.
_ROUNDS_WITH_ONE = 30


class Doubt(enum.IntEnum):
    """NONE: the map is looked up because it is time. MOVED: keys are elsewhere.

    BROKEN: a server of the map is down or refuses.
    """

    NONE = 0
    MOVED = 1
    BROKEN = 2


@dataclass(slots=True)
class _Record:
    """What a source was good for. useless_at: when it brought no news (a count, not a time)."""

    useless_at: int = 0
    has_failed: bool = False
    said: int = 0  # the hash of its last map


@dataclass(slots=True)
class _Round:
    """down: servers of the map that do not answer. asked: in this order."""

    doubt: Doubt = Doubt.NONE
    down: Collection[Endpoint] = ()
    asked: list[Endpoint] = field(default_factory=list)
    answers: dict[Endpoint, Answer] = field(default_factory=dict)
    failures: int = 0

    @property
    def is_broken(self) -> bool:
        return self.doubt is Doubt.BROKEN


class Sources:
    """See the module. Of each round: `begin`, then `next_source` and its answer in turn, `end`.

    seeds: of the URL. are_seeds_all: they are all sources (Sentinels); else the servers of the map
    are. belief: the map in use. teller: who named it last. panel: whose connections to keep.
    """

    def __init__(
        self, seeds: Sequence[Endpoint], are_seeds_all: bool, chance: random.Random | None = None
    ) -> None:
        self.belief: Answer | None = None
        self.panel: list[Endpoint] = []
        self._round = _Round()  # this one, or the last
        self.teller = seeds[0]
        self._seeds = seeds
        self._are_seeds_all = are_seeds_all
        self._chance = chance or random.Random()
        self._records: dict[Endpoint, _Record] = {}
        self._last: Endpoint | None = None  # not to be asked first
        self._in_doubt = 0  # rounds in doubt without news, in a row
        self._rounds_left = 0
        # Since somebody knew the belief's epoch: who last said an older one (else: failed).
        self._without: dict[Endpoint, bool] = {}

    @property
    def answers(self) -> dict[Endpoint, Answer]:
        """The answers of this round, or of the last."""
        return self._round.answers

    # ------------------------------------------------------------------ a round

    def begin(self, doubt: Doubt, down: Collection[Endpoint] = ()) -> None:
        """down: servers of the map that do not answer."""
        is_outdated = self._is_outdated
        self._round = _Round(doubt, down)
        known = {*self._sources, *self._seeds}
        self._records = {each: self._records.get(each, _Record()) for each in known}
        self._without = {each: said for each, said in self._without.items() if each in known}
        self.panel = [each for each in self.panel if each in known]
        # Ask others, less and less often; each time, if no answer has the belief's epoch.
        turns = self._in_doubt & (self._in_doubt - 1) == 0 or is_outdated
        if doubt is Doubt.BROKEN and self._in_doubt and turns:
            self.panel.clear()
        if doubt is Doubt.NONE:
            self._rounds_left -= 1
            if self._rounds_left < 0:
                self._rounds_left = self._chance.randrange(_ROUNDS_WITH_ONE, 2 * _ROUNDS_WITH_ONE)
                self._last = self._last or next(iter(self.panel), None)
                self.panel.clear()

    def next_source(self) -> Endpoint | None:
        """Whom to ask now; None: the round is over."""
        if self.answers and (len(self.answers) >= PANEL or self._is_settled()):
            return None
        left = [each for each in self._sources if each not in self._round.asked]
        if self._round.failures >= (1 if self.answers else PANEL):
            left = []
        if not left and not self.answers:
            left = [each for each in self._seeds if each not in self._round.asked]
        found = min(left, key=self._rank, default=None)
        if found is not None:
            self._round.asked.append(found)
        return found

    def answered(self, source: Endpoint, answer: Answer) -> None:
        self.answers[source] = answer
        record = self._records[source]
        record.has_failed, record.said = False, hash(answer.map)
        if source not in self.panel:
            self.panel.append(source)
        if self.belief is not None and _is_newer(self.belief, answer):
            self._without[source] = True
        else:
            self._epoch_is_known()

    def failed(self, source: Endpoint) -> None:
        """It did not answer, or with an error."""
        self._round.failures += 1
        self._records[source].has_failed = True
        self._useless(source)
        self._without[source] = False
        if source in self.panel:
            self.panel.remove(source)

    def end(self) -> bool:
        """Whether the belief is another map from now on."""
        news = self._news()
        if news is not None:
            is_first = self.belief is None
            self._adopt(news)
            if is_first and not self._are_seeds_all:
                # Else all clients of a cluster would stay with its seeds.
                self.panel.clear()
        elif self.answers:
            self._confirm()
        self._last = None
        if self._round.doubt is Doubt.NONE or news is not None:
            self._in_doubt = 0
            del self.panel[1:]
        elif self._round.asked:
            self._in_doubt += self._round.is_broken
            self._last = self._round.asked[-1]
            for source in self.answers:
                self._useless(source)
        del self.panel[PANEL:]
        return news is not None

    # ------------------------------------------------------------------- inside

    @property
    def _sources(self) -> Sequence[Endpoint]:
        if self._are_seeds_all or self.belief is None:
            return self._seeds
        servers = self.belief.map.servers
        if self._round.is_broken and len(servers) < PANEL:
            # Too few to outvote one that is wrong.
            return tuple(dict.fromkeys((*servers, *self._seeds)))
        return servers

    @property
    def _is_outdated(self) -> bool:
        """Whether no answer of the round has the belief's epoch."""
        return bool(self.answers) and all(map(self._without.get, self.answers))

    def _epoch_is_known(self) -> None:
        self._without.clear()

    def _rank(self, source: Endpoint) -> tuple[bool, bool, bool, bool, int, float]:
        """The least is asked first."""
        record = self._records[source]
        return (
            source == self._last and not self._round.asked,
            # Else who failed once would not be asked what it knows.
            not self._round.is_broken and self._is_outdated and self._without.get(source, False),
            record.has_failed or source in self._round.down,
            source not in self.panel,
            record.useless_at,
            self._chance.random(),
        )

    def _useless(self, source: Endpoint) -> None:
        before = max(record.useless_at for record in self._records.values())
        self._records[source].useless_at = before + 1

    def _is_settled(self) -> bool:
        """Whether more answers would change nothing."""
        belief, news = self.belief, self._news()
        *_, latest = self.answers.values()
        if (news or latest).map.unserved:
            return False
        if belief is None:
            return not latest.doubt
        if self._round.is_broken:
            return news is not None and not news.doubt and _is_newer(news, belief)
        return news is not None or (not latest.doubt and latest.map == belief.map)

    def _news(self) -> Answer | None:
        """What to believe from now on; None: what is believed already."""
        belief, is_broken = self.belief, self._round.is_broken
        if not self.answers:
            return None
        found, votes = self._best()
        if belief is None:
            return found
        if found.map == belief.map:
            return None
        if _is_newer(found, belief):
            return None if found.doubt and not (belief.doubt or is_broken) else found
        if belief.doubt and not found.doubt:
            return found
        teller = self.answers.get(self.teller)
        has_changed = teller is not None and teller.map == found.map
        if _is_newer(belief, found):
            # Who is silent may know it: that counts only where the map does not work.
            is_unknown = all(self._without.get(each, False) for each in self._sources)
            is_unknown |= is_broken and self._without.keys() >= {*self._sources}
            return found if is_unknown and (is_broken or has_changed) else None
        unserved = found.map.unserved - belief.map.unserved
        if has_changed or (unserved < 0 and not found.doubt):
            return found
        if self._round.doubt is Doubt.MOVED and unserved <= 0:
            return found
        if is_broken:
            return found if votes[found.map] >= votes[belief.map] else None
        said = Counter(each.said for each in self._records.values() if not each.has_failed)
        return found if said[hash(found.map)] > said[hash(belief.map)] else None

    def _best(self) -> tuple[Answer, Counter[ServerMap]]:
        """The answer that counts in this round, and how many say each map."""
        some = [each for each in self.answers.values() if not each.doubt]
        some = some or list(self.answers.values())
        if all(each.epoch is not None for each in some):
            newest = max(each.epoch or 0 for each in some)
            some = [each for each in some if each.epoch == newest]
        votes = Counter(each.map for each in some)
        wants_another = self._round.doubt is not Doubt.NONE
        before = None if self.belief is None else self.belief.map
        least = min(each.map.unserved for each in some)
        some = [each for each in some if each.map.unserved == least]
        return max(
            some, key=lambda each: (votes[each.map], (each.map != before) == wants_another)
        ), votes

    def _adopt(self, news: Answer) -> None:
        self.belief = news
        self._epoch_is_known()
        self.teller = next(self._tellers(news.map))
        self.panel.sort(key=lambda each: each != self.teller)

    def _confirm(self) -> None:
        """No news. The map may be the same, with a newer epoch or less doubt."""
        assert self.belief is not None
        same = [each for each in self.answers.values() if each.map == self.belief.map]
        confirmed = _confirmed(self.belief, same)
        if _is_newer(self.belief, confirmed):
            self._epoch_is_known()  # an older one, now
        self.belief = confirmed
        self.teller = next(self._tellers(self.belief.map), self.teller)

    def _tellers(self, server_map: ServerMap) -> Iterator[Endpoint]:
        return (each for each, answer in self.answers.items() if answer.map == server_map)


def _confirmed(belief: Answer, same: Sequence[Answer]) -> Answer:
    """What is believed after answers with the same map, in any order.

    An answer without doubt comes first, unless its epoch is older than the belief's; then one with
    a newer epoch. One without doubt but with an older epoch replaces only a belief in doubt.
    """
    sure = [each for each in same if not each.doubt]
    latest = [each for each in sure if not _is_newer(belief, each)]
    newer = [each for each in same if _is_newer(each, belief)]
    some = latest or newer or sure
    found = max(
        some,
        key=lambda each: (-1 if each.epoch is None else each.epoch, each.doubt),
        default=belief,
    )
    has_lost_doubt = belief.doubt and not found.doubt
    return found if has_lost_doubt or _is_newer(found, belief) else belief


def _is_newer(one: Answer, other: Answer) -> bool:
    return one.epoch is not None and other.epoch is not None and one.epoch > other.epoch
