//! The Internet checksum (RFC 1071).

/// The size of a part whose words are summed independently, in bytes.
const PART: usize = 64;

/// The one's complement sum of 16-bit words in network order. It is not complemented.
pub(crate) fn sum(data: &[u8]) -> u16 {
    // The sum does not depend on the order of bytes in words, and words of 32 bits have the same
    // sum. The compiler makes vector instructions of the inner loop.
    let mut sums = [0_u64; PART / 4];
    let mut parts = data.chunks_exact(PART);
    for part in &mut parts {
        for (sum, word) in sums.iter_mut().zip(part.chunks_exact(4)) {
            *sum += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        }
    }
    let mut words = parts.remainder().chunks_exact(2);
    let mut total: u64 = sums.iter().sum();
    for word in &mut words {
        total += u64::from(u16::from_ne_bytes([word[0], word[1]]));
    }
    if let [last] = words.remainder() {
        total += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    u16::from_be(fold(total))
}

/// The one's complement sum of two sums.
pub(crate) fn add(a: u16, b: u16) -> u16 {
    fold(u64::from(a) + u64::from(b))
}

/// The checksum after a 16-bit word was changed (RFC 1624). Both checksums are complemented.
pub(crate) fn updated(checksum: u16, old: u16, new: u16) -> u16 {
    !add(add(!checksum, !old), new)
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // The loop ends when it fits.
    sum as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_sum_counts_all_words(data in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut expected = 0_u64;
            for word in data.chunks(2) {
                expected += u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0));
            }
            prop_assert_eq!(sum(&data), fold(expected));
        }

        #[test]
        fn a_checksum_is_updated(a: u16, b: u16, c: u16, new: u16) {
            let of = |words: [u16; 3]| !sum(&words.map(u16::to_be_bytes).concat());
            let updated = updated(of([a, b, c]), b, new);
            // 0 and 0xffff are the same number.
            prop_assert_eq!(add(!updated, 0) % 0xffff, add(!of([a, new, c]), 0) % 0xffff);
        }
    }
}
