//! Pauses before something is tried again.

use std::time::Duration;

use super::super::watch::Dice;

/// Each pause is twice the last one, up to a limit, less a part of up to half that chance takes: many routers that lost the
/// same server do not come back in one moment.
pub(super) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
    dice: Dice,
}

impl Backoff {
    /// The first pause, and the longest.
    pub(super) fn new(first: Duration, max: Duration) -> Backoff {
        Backoff {
            first,
            max,
            next: first,
            dice: Dice::new(),
        }
    }

    /// It went well: the next pause is the first again.
    pub(super) fn reset(&mut self) {
        self.next = self.first;
    }

    /// How long to wait now.
    pub(super) fn next(&mut self) -> Duration {
        let pause = self.next.min(self.max);
        self.next = pause.saturating_mul(2);
        pause.mul_f64(1.0 - self.dice.roll() / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_limit_and_begin_anew() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(1000));
        let is_about = |pause: Duration, whole: u64| pause > ms(whole / 2) && pause <= ms(whole);
        for whole in [100, 200, 400, 800, 1000, 1000, 1000] {
            let pause = backoff.next();
            assert!(is_about(pause, whole), "{pause:?}, not {whole} ms");
        }
        backoff.reset();
        assert!(is_about(backoff.next(), 100));
        let mut same = Backoff::new(ms(1000), ms(1000));
        let pauses: Vec<Duration> = (0..8).map(|_| same.next()).collect();
        assert!(pauses.iter().any(|pause| *pause != pauses[0]), "no chance");
    }
}
