"""A subscriber that knows nothing but events, and rebuilds every block table and the prefix cache from them."""


class Mirror:
    def __init__(self, num_groups):
        self.num_groups = num_groups
        self.tables = {}  # (seq_id, group) -> {place: block}
        self.cached = {}  # (group, digest) -> block
        self.counts = {}
        self.failure = None  # what an event raised first: the manager goes on, `compare` tells

    def __call__(self, event):
        kind = type(event).__name__
        self.counts[kind] = self.counts.get(kind, 0) + 1
        try:
            getattr(self, kind)(event)
        except Exception as error:
            self.failure = self.failure or error

    def table(self, seq_id, group):
        return self.tables.setdefault((seq_id, group), {})

    def Held(self, event):
        for place, block in enumerate(event.blocks, event.start):
            self.table(event.seq_id, event.group)[place] = block

    def Dropped(self, event):
        for place in range(event.start, event.stop):
            del self.table(event.seq_id, event.group)[place]

    def Copied(self, event):
        table = self.table(event.seq_id, event.group)
        assert table[event.place] == event.source
        table[event.place] = event.destination

    def Forked(self, event):
        for group in range(self.num_groups):
            table = self.table(event.seq_id, group)
            shared = {place: block for place, block in table.items() if place < event.num_blocks}
            self.tables[event.child_id, group] = shared

    def Stored(self, event):
        assert (event.group, event.digest) not in self.cached
        self.cached[event.group, event.digest] = event.block

    def Evicted(self, event):
        assert self.cached.pop((event.group, event.digest)) == event.block

    def SwappedOut(self, event):
        for seq_id in event.seq_ids:
            for group in range(self.num_groups):
                self.table(seq_id, group).clear()

    def SwappedIn(self, event):
        assert not any(
            self.table(seq_id, group) for seq_id in event.seq_ids for group in range(self.num_groups)
        )

    def Preempted(self, event):
        """What it gives up is told by the `Dropped` that follow."""

    def compare(self, manager):
        if self.failure:
            raise self.failure
        tables = manager._tables
        expected = {}
        for seq_id, row in tables.row_of.items():
            for group, first in enumerate(tables.first_block[:, row].tolist()):
                expected[seq_id, group] = dict(enumerate(tables.held(group, row).tolist(), first))
        assert {key: t for key, t in self.tables.items() if t} == {key: t for key, t in expected.items() if t}
        assert self.cached == manager._prefix.entries()
        counters = manager.stats().counters
        assert self.counts.get("Stored", 0) == counters.stored
        assert self.counts.get("Evicted", 0) == counters.evicted
        assert self.counts.get("Copied", 0) == counters.copied
        assert self.counts.get("Preempted", 0) == counters.preempted
