// The newest step as a line of a log, straight from the ring.
#pragma once
#include "state.h"

namespace fastguard {

// Writes it where a JsonlSink is the only sink and nothing about it is unusual: as `Ledger.write` in Python, to which it is
// left where this returns false. Throws.
bool write_newest(LedgerState& ledger, RingState& ring);

}  // namespace fastguard
