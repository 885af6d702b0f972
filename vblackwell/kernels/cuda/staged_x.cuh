// Where a lane finds x in shared memory, for mma.m16n8k16: rows as bulk copies bring them (BULK, CHUNK windows a slot, 16 bytes longer than what they
// hold), or fragments in their order.
#ifndef BULK
#define BULK 0
#endif
#if BULK
#define X_PITCH (CHUNK * 128 + 16)
#define X_GROUP (8 * X_PITCH)  // from a token to the eighth after it
#define X_HALF 16              // from a block's first eight columns to the others
#else
#define X_GROUP 512
#define X_HALF (TOKENS * 64)
#endif
