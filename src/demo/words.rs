//! Plausible text from a seed: what the simulated engines answer and what the demo's load asks.
//!
//! Pure and deterministic: the same seed gives the same text on every machine, so that a conversation's next turn
//! repeats the bytes of the last answer. ASCII only: it may be cut at any byte.

/// A small seeded source of numbers (SplitMix64, Steele et al. 2014). Not for secrets.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// The same seed gives the same sequence.
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// Next number, any of the 2^64.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number in `from..=to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.roll() % (to.saturating_sub(from) + 1)
    }

    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[(self.roll() % words.len() as u64) as usize]
    }
}

const OPENERS: [&str; 10] = [
    "First",
    "Then",
    "After that",
    "In practice",
    "As a check",
    "So",
    "For this case",
    "Meanwhile",
    "Next",
    "Finally",
];
const ADJECTIVES: [&str; 16] = [
    "shared", "stale", "bounded", "nested", "idle", "recent", "partial", "missing", "local",
    "empty", "slow", "pending", "strict", "second", "short", "open",
];
const NOUNS: [&str; 24] = [
    "queue", "prefix", "worker", "cache", "request", "block", "stream", "test", "module", "batch",
    "timeout", "index", "handler", "config", "token", "buffer", "answer", "socket", "counter",
    "branch", "parser", "schedule", "limit", "trace",
];
const VERBS: [&str; 16] = [
    "holds", "drops", "reads", "checks", "fills", "returns", "keeps", "moves", "writes", "splits",
    "joins", "skips", "counts", "opens", "repeats", "follows",
];
const REASONS: [&str; 8] = [
    "because the order matters",
    "so the result stays the same",
    "before anything is sent",
    "until the last byte is out",
    "which explains the failure",
    "as the log shows",
    "and the second run agrees",
    "without a copy",
];

/// Whole sentences, at least `bytes_min` bytes of them.
pub fn sentences(seed: u64, bytes_min: usize) -> String {
    let mut dice = Dice::new(seed);
    let mut text = String::with_capacity(bytes_min + 120);
    loop {
        push_sentence(&mut dice, &mut text);
        if text.len() >= bytes_min {
            return text;
        }
        text.push(' ');
    }
}

/// Exactly `length` bytes, cut wherever that falls, as an answer ended by its token limit is.
pub fn cut(seed: u64, length: usize) -> String {
    let mut text = sentences(seed, length);
    text.truncate(length);
    text
}

fn push_sentence(dice: &mut Dice, text: &mut String) {
    let form = dice.roll() % 4;
    if form == 0 {
        text.push_str(dice.pick(&OPENERS));
        text.push_str(", the ");
    } else {
        text.push_str("The ");
    }
    push_clause(dice, text);
    match form {
        1 => {
            text.push_str(", and the ");
            push_clause(dice, text);
        }
        2 => {
            text.push(' ');
            text.push_str(dice.pick(&REASONS));
        }
        _ => {}
    }
    text.push('.');
}

fn push_clause(dice: &mut Dice, text: &mut String) {
    let words = [
        dice.pick(&ADJECTIVES),
        dice.pick(&NOUNS),
        dice.pick(&VERBS),
        "the",
        dice.pick(&ADJECTIVES),
        dice.pick(&NOUNS),
    ];
    text.push_str(&words.join(" "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_text_and_another_seed_another() {
        assert_eq!(sentences(7, 500), sentences(7, 500));
        assert_ne!(sentences(7, 500), sentences(8, 500));
    }

    #[test]
    fn a_longer_text_begins_with_the_shorter_one() {
        let long = sentences(3, 2000);
        assert!(long.starts_with(&sentences(3, 300)));
        assert!(long.starts_with(&cut(3, 1234)));
    }

    #[test]
    fn lengths_are_kept_and_every_byte_is_ascii() {
        for seed in 0..200 {
            let length = (seed as usize * 37) % 900;
            let whole = sentences(seed, length);
            assert!(
                whole.len() >= length && whole.len() < length + 130,
                "seed {seed}: {}",
                whole.len()
            );
            assert!(
                whole.is_ascii() && whole.ends_with('.'),
                "seed {seed}: {whole}"
            );
            assert_eq!(cut(seed, length).len(), length, "seed {seed}");
        }
    }

    #[test]
    fn between_reaches_both_ends_and_nothing_else() {
        let mut dice = Dice::new(1);
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[dice.between(2, 6) as usize - 2] += 1;
        }
        assert!(seen.iter().all(|n| *n > 100), "{seen:?}");
        assert_eq!(dice.between(9, 9), 9);
    }
}
