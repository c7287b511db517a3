//! Sleeps that gather, on real sockets.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

use super::*;

const GATHER: Duration = Duration::from_millis(200);
const LATER: Duration = Duration::from_millis(40);

fn ring() -> Ring {
    let limits = RingLimits {
        buffer_count: 8,
        buffer_bytes: 4096,
        multishot_receive: true,
        defer_taskrun: true,
    };
    let wake = eventfd().unwrap();
    let ring = Ring::new(limits, &wake).unwrap();
    std::mem::forget(wake); // It is read as long as the ring is there.
    ring
}

/// A connection that the ring receives on, and its other end.
fn connection(ring: &mut Ring, index: u32) -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let ours = OwnedFd::from(listener.accept().unwrap().0);
    let token = Token {
        index,
        generation: 0,
    };
    ring.receive(token, &ours);
    (ours, theirs)
}

/// How many pieces one sleep took: of two, of which one comes when it begins and the other later.
fn pieces_of_a_sleep(gather: Duration) -> usize {
    let mut ring = ring();
    let (_first, mut at_once) = connection(&mut ring, 0);
    let (_second, mut later) = connection(&mut ring, 1);
    at_once.write_all(b"x").unwrap();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(LATER);
        later.write_all(b"y").unwrap();
        later
    });
    ring.turn(Duration::from_secs(5), gather).unwrap();
    let count = ring.event_count();
    thread.join().unwrap();
    while ring.next_event().is_some() {}
    count
}

#[test]
fn a_sleep_that_gathers_takes_what_comes_meanwhile() {
    assert_eq!(pieces_of_a_sleep(Duration::ZERO), 1);
    if probe().unwrap().minimum_wait {
        assert_eq!(pieces_of_a_sleep(GATHER), 2);
    } else {
        println!("NOT TRIED: this kernel has no minimal wait");
    }
}

#[test]
fn what_comes_after_the_gathering_ends_the_sleep_at_once() {
    if !probe().unwrap().minimum_wait {
        return println!("NOT TRIED: this kernel has no minimal wait");
    }
    let mut ring = ring();
    let (_ours, mut theirs) = connection(&mut ring, 0);
    let thread = std::thread::spawn(move || {
        std::thread::sleep(2 * LATER);
        theirs.write_all(b"x").unwrap();
        theirs
    });
    let began = Instant::now();
    ring.turn(Duration::from_secs(5), LATER / 4).unwrap();
    let slept = began.elapsed();
    assert_eq!(ring.event_count(), 1);
    assert!(slept < Duration::from_secs(4), "{slept:?}");
    let _theirs = thread.join().unwrap(); // Open: its end would be an event.
    while ring.next_event().is_some() {}
    ring.turn(LATER, LATER / 4).unwrap();
    assert_eq!(ring.event_count(), 0, "nothing came, and it ended in time");
}
