//! redis: RESP2 over TCP (<https://redis.io/docs/latest/develop/reference/protocol-spec/>).

use super::{Exchange, KEY, value};

/// GET of a value of so many bytes.
#[must_use]
pub fn get(bytes: usize) -> Exchange {
    let head = format!("${bytes}\r\n");
    Exchange {
        request: command(&[b"GET", KEY.as_bytes()]),
        response: [head.as_bytes(), &value(bytes), b"\r\n"].concat(),
    }
}

/// SET of a value of so many bytes.
#[must_use]
pub fn set(bytes: usize) -> Exchange {
    Exchange {
        request: command(&[b"SET", KEY.as_bytes(), &value(bytes)]),
        response: b"+OK\r\n".to_vec(),
    }
}

fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).into_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_protocol() {
        let Exchange { request, response } = set(3);
        assert_eq!(request, b"*3\r\n$3\r\nSET\r\n$10\r\nbluebridge\r\n$3\r\nabc\r\n");
        assert_eq!(response, b"+OK\r\n");
        let Exchange { request, response } = get(3);
        assert_eq!(request, b"*2\r\n$3\r\nGET\r\n$10\r\nbluebridge\r\n");
        assert_eq!(response, b"$3\r\nabc\r\n");
    }
}
