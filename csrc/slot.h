// A step as bytes; fastguard/records/slot.py has the table.
#pragma once

namespace fastguard {

// Words of a header.
enum Word {
  kNormSq, kNorm, kClipCoef, kFactor, kLossScale, kStep = 6, kTrigger, kLoss, kValLoss, kLr, kOverhead, kNumRows = 14, kFlags
};
constexpr long kHeaderWords = 16;

// Bits of the word kFlags.
enum Flag { kSkipped = 1, kHasLoss = 2, kHasValLoss = 4, kHasLr = 8, kHasLossScale = 16, kHasTrigger = 32 };

}  // namespace fastguard
