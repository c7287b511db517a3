//! What the simulations of `tests/` need of their `common`, with the fuzzer's bytes in the place of the generator: each
//! choice takes one, so that a changed byte changes one choice.

use std::cell::RefCell;

#[path = "../../tests/common/line.rs"]
pub mod line;
#[path = "../../tests/common/naive.rs"]
pub mod naive;

#[derive(Default)]
struct Tape {
    bytes: Vec<u8>,
    at: usize,
    /// Where the bytes are at their end, a generator goes on, begun from them.
    state: u64,
    /// How many numbers were drawn whole: ids are made of them, and no two of those are alike.
    drawn: u64,
}

thread_local! {
    static TAPE: RefCell<Tape> = RefCell::default();
}

/// The choices of the next case.
pub fn wind(bytes: &[u8]) {
    let fold = |state: u64, byte: &u8| (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let state = bytes.iter().fold(0xcbf2_9ce4_8422_2325, fold);
    TAPE.with_borrow_mut(|tape| {
        tape.bytes.clear();
        tape.bytes.extend_from_slice(bytes);
        tape.at = 0;
        tape.state = state;
        tape.drawn = 0;
    });
}

impl Tape {
    fn take(&mut self, count: usize) -> u64 {
        if let Some(bytes) = self.bytes.get(self.at..self.at + count) {
            self.at += count;
            return bytes.iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
        }
        self.at = self.bytes.len();
        mix(&mut self.state)
    }
}

fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The same interface as that of the tests; all of them read one tape.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        let next = TAPE.with_borrow_mut(|tape| {
            tape.drawn += 1;
            mix(&mut (tape.take(8) ^ tape.drawn << 32))
        });
        self.0 ^= next;
        next
    }

    pub fn below(&mut self, n: u64) -> u64 {
        let count = match n {
            0..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 8,
        };
        TAPE.with_borrow_mut(|tape| tape.take(count)) % n
    }
}

pub fn seed() -> u64 {
    0
}

pub fn chat(text: &str) -> Vec<u8> {
    serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text}]})
        .to_string()
        .into_bytes()
}
