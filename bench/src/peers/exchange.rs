//! A request and its response, whose bytes are all known.

/// What is sent, and what comes back if all is well.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Exchange {
    /// The bytes of the request.
    pub request: Vec<u8>,
    /// The bytes of the response.
    pub response: Vec<u8>,
}

impl Exchange {
    /// Checks the begin and the end of a response, which has the right length.
    pub(super) fn check_ends(&self, response: &[u8]) -> Result<(), String> {
        const ENDS: usize = 16;
        let length = self.response.len().min(ENDS);
        let tail = self.response.len() - length;
        let is_right = response[..length] == self.response[..length]
            && response[tail..] == self.response[tail..];
        if is_right { Ok(()) } else { Err(self.wrong(response)) }
    }

    /// Checks all of a response.
    pub(super) fn check(&self, response: &[u8]) -> Result<(), String> {
        if response == self.response { Ok(()) } else { Err(self.wrong(response)) }
    }

    fn wrong(&self, response: &[u8]) -> String {
        let begin = String::from_utf8_lossy(&response[..response.len().min(64)]).into_owned();
        format!("a response of {} bytes begins with {begin:?}", response.len())
    }
}
