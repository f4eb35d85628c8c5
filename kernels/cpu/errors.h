// Every way a native call can fail, as one exception type with named fields.
// The bindings turn it into one Python exception class per kind, whose only argument is a dict of the fields;
// core translates those into the cam.CamError tree. Nothing here knows Python.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace cam {

enum class Failure : uint32_t {
    none = 0,
    wait_timeout = 1,        // a peer was late
    peer_died = 2,           // a peer's process ended, or it left the group, while we waited for it
    aborted = 3,             // an earlier failure, here or at a peer, broke the group
    parameter_mismatch = 4,  // ranks called one collective with different parameters
    out_of_memory = 5,       // some rank's window cannot hold the result
    bad_input = 6,           // this rank's own arguments are wrong; nothing was sent
};

struct Error : std::exception {
    Failure failure = Failure::none;
    std::string message;
    std::string operation, phase;
    std::vector<int32_t> ranks;  // the late, dead, deviating or exhausted ranks
    double waited_s = 0;
    std::string field, mine, theirs;                  // parameter_mismatch
    int64_t requested = 0, allocated = 0, limit = 0;  // out_of_memory, bytes

    Error(Failure kind, std::string text) : failure(kind), message(std::move(text)) {}
    const char* what() const noexcept override { return message.c_str(); }
};

[[noreturn]] inline void bad_input(std::string text) { throw Error(Failure::bad_input, std::move(text)); }

}  // namespace cam
