"""Threads in lockstep: one greenlet per thread, switched at barriers and warp collectives only.

Blocks run one after the other, those of a cluster together. Each warp runs until all its threads wait or have ended; a
collective that all its lanes have reached is answered and the warp goes on. When every warp of a block stands at its
barrier, time advances and all go on. Whoever waits for something that cannot come is reported with the places of all
others.
"""

from __future__ import annotations

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from numba_attn.sim import clusters, collectives, mbarriers
from numba_attn.sim.blocks import GROUP, Grid
from numba_attn.sim.errors import MAX_LISTED, SimulationError, fail_from, file_line, threads_text
from numba_attn.sim.marks import MAX_THREADS
from numba_attn.sim.shared import FinerUnitsError
from numba_attn.sim.threads import WARP, Thread
from numba_attn.sim.warpgroups import Warpgroup

ENDED = "ended"
WAITS = MBARRIER, NAMED, CLUSTER = "mbarrier wait", "named barrier", "cluster barrier"
PRODUCT = "warpgroup product"
EVENTS = (*WAITS, PRODUCT)
"""What threads wait for without standing at a collective of their warp or block."""

_NEVER_COMES = {
    MBARRIER: "wait for a phase that nobody completes",
    NAMED: "named barrier that is not reached by all its threads",
    CLUSTER: "cluster barrier not reached by all threads of the cluster",
}


class Hub:
    """Runs the blocks of a grid, one cluster after the other."""

    def __init__(self, grid: Grid, context):
        self.grid = grid
        self.context = context
        n, ranks = grid.block_threads, range(grid.cluster)
        self.of_block = [[Thread(grid, rank, tid, getcurrent()) for tid in range(n)] for rank in ranks]
        self.threads = [thread for own in self.of_block for thread in own]
        self.warps = [own[i : i + WARP] for own in self.of_block for i in range(0, n, WARP)]
        self.groups = [own[i : i + GROUP] for own in self.of_block for i in range(0, n, GROUP)]
        grid.threads = {thread.index: thread for thread in self.threads}

    def run(self, number: int, programs) -> None:
        """Run one cluster; `programs[i](None)` is what thread i of its blocks executes."""
        blocks = self.grid.start(number)
        for thread, program in zip(self.threads, programs, strict=True):
            thread.start(blocks[thread.rank], greenlet(program))
            thread.greenlet.gr_context = self.context
        try:
            waiting = self.warps
            while waiting:
                for warp in waiting:
                    self._run_warp(warp)
                waiting = self._go_on()
        finally:
            for thread in self.threads:
                if thread.greenlet:
                    thread.greenlet.throw(GreenletExit)

    def _run_warp(self, warp) -> None:
        ready = [thread for thread in warp if thread.request is None]
        while ready:
            for thread in ready:
                try:
                    thread.greenlet.switch(thread.answer)
                except (SimulationError, FinerUnitsError):
                    raise
                except Exception as error:
                    fail_from(thread, error)
                if thread.greenlet.dead:
                    thread.request = ENDED
                    thread.end()
            ready = self._meet(warp)

    def _go_on(self):
        """The warps that can run, now that all threads wait; none if all have ended."""
        while any(thread.request in EVENTS for thread in self.threads):
            if self._pass_events() or (self.grid.cluster > 1 and self._pass_block_barriers()):
                return [warp for warp in self.warps if any(thread.request is None for thread in warp)]
            if not self.grid.copies:
                self._fail_events()
            # The last one first: who relies on an order of copies relies on nothing.
            self.grid.copies.pop().land()
        return self._pass_block_barriers()

    def _pass_events(self) -> list:
        """Let threads go on because of an mbarrier's phase, a named barrier, or a whole warpgroup at a product."""
        ready = []
        for thread in self.threads:
            if thread.request == MBARRIER and thread.value[0].is_complete(thread.value[1]):
                thread.request = thread.answer = None
                ready.append(thread)
            elif thread.request == CLUSTER and clusters.may_pass(thread):
                thread.request = thread.answer = thread.cluster_phase = None
                ready.append(thread)
        for block in self.grid.blocks:
            while block.passed:
                ready += block.passed.pop().go_on()
        for lanes in self.groups:
            at_product = {(thread.request, thread.site) for thread in lanes}
            if len(lanes) == GROUP and len(at_product) == 1 and lanes[0].request == PRODUCT:
                group = Warpgroup(lanes)
                for thread in lanes:
                    thread.answer, thread.request = group, None
                ready += lanes
        return ready

    def _meet(self, warp) -> list:
        """Answer the collectives whose lanes are all there; returns the lanes that go on."""
        groups = self._collectives(warp)
        if not groups:
            return []
        ready = []
        for (request, mask, _), lanes in groups.items():
            present = sum(1 << thread.lane for thread in lanes)
            if request == "activemask" or present == mask:
                self._answer(request, present, lanes)
                ready += lanes
        if not ready and not any(thread.request in EVENTS for thread in warp):
            self._fail_diverged(warp, groups)
        return ready

    def _collectives(self, warp) -> dict:
        """The lanes at each collective of the warp."""
        groups = {}
        for thread in warp:
            if thread.request in collectives.WARP_WIDE:
                groups.setdefault((thread.request, thread.mask, thread.site), []).append(thread)
        return groups

    def _answer(self, request: str, present: int, lanes) -> None:
        if request == "syncwarp":
            self._pass_warp_barrier(lanes)
            answers = [None] * len(lanes)
        else:
            answers = collectives.answer(request, present, lanes)
        for thread, answer in zip(lanes, answers, strict=True):
            thread.answer = answer
            thread.request = None

    def _pass_warp_barrier(self, lanes) -> None:
        time = lanes[0].block.clock.tick()
        seen = [max(times) for times in zip(*(thread.seen for thread in lanes), strict=True)]
        for thread in lanes:
            seen[thread.lane] = time
        for thread in lanes:
            thread.seen = seen
        known = [thread.known for thread in lanes if thread.known is not None]
        for thread in lanes if known else ():
            thread.known = np.maximum.reduce(known)
        for thread in lanes:
            thread.warp_mark = min(seen) * MAX_THREADS

    def _pass_block_barriers(self) -> list:
        """Let the threads of each block pass the barrier at which they all stand; the warps that go on."""
        return [warp for own in self.of_block if self._pass_block_barrier(own) for warp in self._warps_of(own)]

    def _warps_of(self, own: list) -> list:
        n = len(self.warps) // self.grid.cluster
        return self.warps[own[0].rank * n : (own[0].rank + 1) * n]

    def _pass_block_barrier(self, threads: list) -> bool:
        """Whether the threads of a block have passed a barrier; not if some wait for something else or all ended."""
        requests = {(thread.request, thread.site if thread.request != ENDED else -1) for thread in threads}
        if any(request in EVENTS for request, _ in requests):
            return False
        if len(requests) > 1:
            self._fail("barrier not reached by all threads of the block", threads, collectives.BLOCK_WIDE)
        request, _ = requests.pop()
        if request == ENDED:
            return False
        threads[0].block.clock.new_block()
        # What others released, and bytes that have come, are known to all if one thread knows them.
        known = list({id(thread.known): thread.known for thread in threads if thread.known is not None}.values())
        known = np.maximum.reduce(known) if len(known) > 1 else known[0] if known else None
        answer = collectives.BLOCK_WIDE[request]([thread.value for thread in threads])
        for thread in threads:
            thread.known, thread.answer, thread.request = known, answer, None
        return True

    def _fail_events(self) -> None:
        """Nobody can go on, and some wait for what only others can bring about."""
        for warp in self.warps:
            groups = self._collectives(warp)
            if groups:
                self._fail_diverged(warp, groups)
        for group in self.groups:
            requests = {thread.request for thread in group}
            if PRODUCT in requests and requests.isdisjoint(WAITS):
                self._fail("products not reached by the whole warpgroup", self.threads, [PRODUCT])
        requests = {thread.request for thread in self.threads}
        kind = next(kind for kind in WAITS if kind in requests)
        self._fail(_NEVER_COMES[kind], self.threads, [kind], mbarriers.unfinished(self.grid))

    def _fail_diverged(self, warp, groups) -> None:
        number = warp[0].tid // WARP
        (request, mask, _), lanes = next(iter(groups.items()))
        there = {thread.lane for thread in lanes}
        missing = [lane for lane in range(WARP) if mask >> lane & 1 and lane not in there]
        outside = [thread.tid for thread in lanes if not mask >> thread.lane & 1]
        if outside:
            what = f"{request} called by lanes that are not in its mask {mask:#x} ({threads_text(outside)})"
        elif missing[-1] >= len(warp):
            what = f"{request} with mask {mask:#x} in warp {number}, which has {len(warp)} lanes"
        else:
            what = f"{request} with mask {mask:#x} not reached by all its lanes in warp {number}"
        self._fail(what, warp, collectives.WARP_WIDE)

    def _fail(self, what: str, threads, kinds, more: str = "") -> None:
        places = {}
        for thread in threads:
            site = thread.site if thread.request != ENDED else -1
            places.setdefault((thread.request, site), []).append(thread.index)
        texts = []
        for (request, site), numbers in list(places.items())[:MAX_LISTED]:
            where = "returned" if request == ENDED else f"at {request} {file_line(*self.grid.site_line(site))}"
            texts.append(f"{self.grid.text(numbers)} {where}")
        more = (" ..." if len(places) > MAX_LISTED else "") + more
        # The line at fault is one that waits; if several do, the one with the fewest threads.
        waiting = [(len(numbers), site, numbers) for (request, site), numbers in places.items() if request in kinds]
        _, site, numbers = min(waiting)
        file, line = self.grid.site_line(site)
        blocks = ", ".join(str(block) for block in dict.fromkeys(thread.block for thread in threads))
        message = f"{what}: {'; '.join(texts)}{more}; kernel `{self.grid.name}`, {blocks}"
        raise SimulationError(message, file, line, tuple({number % self.grid.stride: None for number in numbers}))
