//! The responder against hand-made requests.
