// The load client of the benchmarks, the same for every server: closed-loop HTTP/1.1 over kept-alive connections.
//
// Each connection sends a fixed request, waits for the whole answer, checks it, and sends the next. What comes out is
// one line of JSON on stdout: requests, errors, throughput and latencies in microseconds. It exits with 0 also where
// answers were wrong (`errors` counts them, `first_error` shows one), with 2 where nothing could be measured.
//
// usage: load (--tcp PORT | --unix PATH) [options]
//   --connections N     at once (1)
//   --seconds S         measure this long, after --warmup seconds that do not count
//   --count N           or send N requests in all
//   --method M --path P --header 'Name: value' (repeatable) --body TEXT
//   --expect TEXT       what a right answer's body contains; "{n}" in it and in the body is the request's number
//   --pace-ms N         between two requests of a connection, counted from the earlier one's start (0: none)
//   --until-stdin-ends  stop early, when stdin is closed
//   --stall-sec N       give up when nothing at all arrives for so long (30)
//   --frames            one request whose answer is a stream of frames: count its output, check that nothing is missing
//   --bulk              one request after the other (--count N in all, else one) whose answers are long: count their
//                       bytes (each must have --expect-bytes N), take the time to the first one and to the last
//   --upload N          with --bulk: the request's body is N bytes of a fixed pattern
//   --verify            with --bulk: the answers' bytes must be that pattern

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 4096, MAX_ANSWER_BYTES = 1 << 22, READ_BYTES = 1 << 18, PATTERN_BYTES = (1 << 20) - 3 };

static const char *port, *unix_path, *method = "GET", *path = "/healthz", *body = "", *expect = "";
static char headers[8192];
static int connection_count = 1, frames, bulk, verify, until_stdin_ends;
static double measure_sec = 1, warmup_sec, stall_sec = 30, pace_ms;
static long request_count, expect_bytes = -1, upload_bytes = -1;

static void fail(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, errno ? strerror(errno) : "failed");
    exit(2);
}

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

// With `type` SOCK_NONBLOCK a TCP connection may still be under way: a server with a short backlog lets one wait.
static int connected(int type) {
    int fd, one = 1, done;
    if (unix_path) {
        struct sockaddr_un at = {.sun_family = AF_UNIX};
        snprintf(at.sun_path, sizeof at.sun_path, "%s", unix_path);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        done = connect(fd, (struct sockaddr *)&at, sizeof at);
    } else {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | type, 0);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        done = connect(fd, (struct sockaddr *)&at, sizeof at);
        if (done < 0 && errno == EINPROGRESS) done = 0;
    }
    if (fd < 0 || done < 0) fail("connect");
    return fd;
}

// `text` with each "{n}" replaced by the number; to be freed.
static char *numbered(const char *text, long number) {
    char digits[24], *whole = malloc(strlen(text) * 8 + 1), *to = whole;
    if (!whole) fail("memory");
    snprintf(digits, sizeof digits, "%ld", number);
    while (*text) {
        if (!strncmp(text, "{n}", 3)) to = stpcpy(to, digits), text += 3;
        else *to++ = *text++;
    }
    *to = 0;
    return whole;
}

static char *request_for(long number, size_t *length) {
    char *text = numbered(body, number), *whole = NULL;
    size_t bytes = upload_bytes >= 0 ? (size_t)upload_bytes : strlen(text);
    char sized[48] = "";  // no GET without a body says that it has none
    if (bytes || strcmp(method, "GET")) snprintf(sized, sizeof sized, "Content-Length: %zu\r\n", bytes);
    int made = asprintf(&whole, "%s %s HTTP/1.1\r\nHost: localhost\r\n%s%s\r\n%s", method, path, headers, sized, text);
    if (made < 0) fail("memory");
    *length = (size_t)made;
    free(text);
    return whole;
}

// ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────

// Where a whole answer stands in `data`: its bytes in all; 0 where more must come, -1 where it is no HTTP. A chunked
// body is joined in place, so that `text` and `length` are the body either way.
static long whole_answer(char *data, long got, int *status, char **text, long *length) {
    data[got] = 0;
    char *end = strstr(data, "\r\n\r\n");
    if (!end) return got > 65536 ? -1 : 0;
    if (sscanf(data, "HTTP/1.%*d %d", status) != 1) return -1;
    char *at = end + 4, *sized = strcasestr(data, "\r\nContent-Length:"), *chunked = strcasestr(data, "\r\nTransfer-Encoding: chunked");
    *text = at;
    if (sized && sized < end) {
        *length = strtol(sized + 17, NULL, 10);
        return at + *length <= data + got ? at + *length - data : 0;
    }
    if (!chunked || chunked > end) return -1;
    // Joining moves bytes, so it must wait until the last chunk is there.
    for (char *look = at;;) {
        char *line = strstr(look, "\r\n");
        if (!line) return 0;
        long size = strtol(look, NULL, 16);
        look = line + 2 + size + 2;
        if (look > data + got) return 0;
        if (size == 0) break;
    }
    char *to = at;
    for (;;) {
        char *line = strstr(at, "\r\n");
        long size = strtol(at, NULL, 16);
        at = line + 2 + size + 2;
        if (size == 0) break;
        memmove(to, line + 2, (size_t)size), to += size;
    }
    *length = to - *text;
    return at - data;
}

// ── many small requests ────────────────────────────────────────────────────────────────────────────────────────

struct connection {
    int fd, connecting;
    char *request;
    long number, got, room;
    size_t length;
    uint64_t started_ns, due_ns;  // due_ns 0: a request is under way
    char *data;
};

static struct connection connections[MAX_CONNECTIONS];
static int epoll;
static uint64_t *latencies_ns;
static long measured, room, sent, finished, errors;
static char first_error[400];

static void wrong(const char *what, const char *text, long length) {
    if (errors++) return;
    int at = snprintf(first_error, sizeof first_error, "%s: ", what);
    for (long i = 0; i < length && at < (int)sizeof first_error - 2; i++)
        first_error[at++] = text[i] < 32 || text[i] == '"' || text[i] == '\\' || text[i] > 126 ? ' ' : text[i];
    first_error[at] = 0;
}

static void send_next(struct connection *c) {
    if (!c->request || strstr(body, "{n}")) {
        free(c->request);
        c->request = request_for(sent, &c->length);
    }
    c->number = sent++, c->got = 0, c->due_ns = 0, c->started_ns = now_ns();
    if (c->fd < 0) {  // a server that hangs up after each answer makes its callers pay for the connection too
        c->fd = connected(SOCK_NONBLOCK), c->connecting = 1;
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.u32 = (uint32_t)(c - connections)};
        epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
        return;
    }
    if (send(c->fd, c->request, c->length, MSG_NOSIGNAL) != (ssize_t)c->length) fail("send");
}

static void send_on_new(struct connection *c) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if ((errno = error)) fail("connect");
    c->connecting = 0;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)(c - connections)};
    epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event);
    if (send(c->fd, c->request, c->length, MSG_NOSIGNAL) != (ssize_t)c->length) fail("send");
}

static int is_last(const char *head) {
    const char *end = strstr(head, "\r\n\r\n"), *closes = strcasestr(head, "\r\nConnection: close");
    return !strncmp(head, "HTTP/1.0", 8) || (closes && closes < end);
}

static void keep(uint64_t ns) {
    if (measured == room) {
        room = room ? room * 2 : 65536;
        if (!(latencies_ns = realloc(latencies_ns, (size_t)room * sizeof *latencies_ns))) fail("memory");
    }
    latencies_ns[measured++] = ns;
}

// Reads what there is; 1 where the answer is complete.
static int take(struct connection *c, uint64_t measure_from_ns) {
    if (c->room - c->got < READ_BYTES / 4) {
        c->room = c->room ? c->room * 2 : READ_BYTES;
        if (c->room > MAX_ANSWER_BYTES) fail("an answer is too long");
        if (!(c->data = realloc(c->data, (size_t)c->room + 1))) fail("memory");
    }
    ssize_t got = recv(c->fd, c->data + c->got, (size_t)(c->room - c->got), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got < 0 && errno != ECONNRESET) fail("recv");
    int status = 0;
    long length = 0, whole = -1;
    char *text = "";
    if (got > 0) {
        c->got += got;
        whole = whole_answer(c->data, c->got, &status, &text, &length);
        if (whole == 0) return 0;
    }
    uint64_t now = now_ns();
    finished++;
    if (whole < 0) {
        wrong(got <= 0 ? "hung up" : "not HTTP", c->data, c->got);
        close(c->fd);
        c->fd = -1;
        return 1;
    }
    char *expected = numbered(expect, c->number);
    if (status != 200 || !memmem(text, (size_t)length, expected, strlen(expected))) wrong(status == 200 ? "unexpected" : "status", c->data, c->got);
    free(expected);
    if (is_last(c->data)) {
        close(c->fd);
        c->fd = -1;
    }
    if (now >= measure_from_ns) keep(now - c->started_ns);
    return 1;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static double percentile_us(double share) {
    if (!measured) return 0;
    long at = (long)(share * (double)measured);
    return (double)latencies_ns[at < measured ? at : measured - 1] / 1e3;
}

static void load(void) {
    epoll = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < connection_count; i++) {
        connections[i].fd = connected(0);
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        epoll_ctl(epoll, EPOLL_CTL_ADD, connections[i].fd, &event);
    }
    if (until_stdin_ends) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = MAX_CONNECTIONS};
        epoll_ctl(epoll, EPOLL_CTL_ADD, 0, &event);
    }
    uint64_t begin_ns = now_ns(), from_ns = begin_ns + (uint64_t)(warmup_sec * 1e9), last_ns = begin_ns;
    uint64_t until_ns = request_count ? UINT64_MAX : from_ns + (uint64_t)(measure_sec * 1e9);
    uint64_t pace_ns = (uint64_t)(pace_ms * 1e6);
    for (int i = 0; i < connection_count && (!request_count || sent < request_count); i++) send_next(&connections[i]);
    while (request_count ? finished < request_count : finished < sent || now_ns() < until_ns) {
        struct epoll_event events[256];
        int paced = 0, count = epoll_wait(epoll, events, 256, pace_ns ? 1 : 100);
        uint64_t now = now_ns();
        for (int i = 0; i < count; i++) {
            if (events[i].data.u32 == MAX_CONNECTIONS) {
                epoll_ctl(epoll, EPOLL_CTL_DEL, 0, NULL);
                until_ns = now;
                continue;
            }
            struct connection *c = &connections[events[i].data.u32];
            last_ns = now;
            if (c->connecting) {
                send_on_new(c);
                continue;
            }
            if (!take(c, from_ns)) continue;
            if (request_count ? sent >= request_count : now >= until_ns) continue;
            if (pace_ns && c->started_ns + pace_ns > now) c->due_ns = c->started_ns + pace_ns;
            else send_next(c);
        }
        for (int i = 0; pace_ns && i < connection_count; i++) {
            if (!connections[i].due_ns) continue;
            paced = 1;
            if (now < connections[i].due_ns || now >= until_ns) continue;
            if (!request_count || sent < request_count) send_next(&connections[i]);
        }
        if (!count && !paced && (double)(now - last_ns) > stall_sec * 1e9) {
            wrong("nothing arrived for too long", "", 0);
            break;
        }
    }
    // The tail after the deadline is measured too, or the slowest requests would never count; the rate ends with it.
    double seconds = last_ns > from_ns ? (double)(last_ns - from_ns) / 1e9 : 0;
    qsort(latencies_ns, (size_t)measured, sizeof *latencies_ns, by_size);
    printf("{\"requests\":%ld,\"errors\":%ld,\"seconds\":%.6f,\"per_sec\":%.3f,\"p50_us\":%.1f,\"p90_us\":%.1f,"
           "\"p99_us\":%.1f,\"max_us\":%.1f,\"first_error\":\"%s\"}\n",
           measured, errors + (sent - finished), seconds, seconds > 0 ? (double)measured / seconds : 0,
           percentile_us(0.5), percentile_us(0.9), percentile_us(0.99), percentile_us(1), first_error);
}

// ── one streamed command ───────────────────────────────────────────────────────────────────────────────────────

static struct {
    unsigned char head[13];
    uint32_t head_bytes, left, kind;  // of the frame that is coming in
    uint64_t out_bytes, err_bytes, gaps, heartbeats, misplaced;
    char exit_json[4096];
    uint32_t exit_bytes;
    int ended;
} stream;

static uint64_t big_endian(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | *at++;
    return value;
}

static void take_frames(const unsigned char *data, size_t length) {
    while (length) {
        uint32_t need = stream.head_bytes >= 5 && (stream.kind == 2 || stream.kind == 3) ? 13 : 5;
        if (stream.head_bytes < need) {
            stream.head[stream.head_bytes++] = *data++, length--;
            if (stream.head_bytes == 5) {
                stream.kind = stream.head[0], stream.left = (uint32_t)big_endian(stream.head + 1, 4);
                stream.gaps += stream.kind == 5, stream.heartbeats += stream.kind == 4;
            } else if (stream.head_bytes == 13) {
                uint64_t *total = stream.kind == 2 ? &stream.out_bytes : &stream.err_bytes;
                stream.misplaced += big_endian(stream.head + 5, 8) != *total;
                stream.left -= 8;
            }
        } else {
            size_t piece = length < stream.left ? length : stream.left;
            if (stream.kind == 2) stream.out_bytes += piece;
            else if (stream.kind == 3) stream.err_bytes += piece;
            else if (stream.kind == 6 || stream.kind == 7) {
                for (size_t i = 0; i < piece && stream.exit_bytes < sizeof stream.exit_json - 1; i++)
                    stream.exit_json[stream.exit_bytes++] = (char)data[i];
            }
            data += piece, length -= piece, stream.left -= (uint32_t)piece;
        }
        need = stream.head_bytes >= 5 && (stream.kind == 2 || stream.kind == 3) ? 13 : 5;
        if (stream.head_bytes == need && stream.left == 0) {
            stream.ended |= stream.kind == 6;
            stream.head_bytes = 0, stream.kind = 0;
        }
    }
}

// A chunked body as it comes, in pieces cut anywhere.
static struct {
    enum { SIZE_LINE, IN_CHUNK, AFTER_CHUNK, TRAILERS, BODY_ENDED } state;
    char line[256];
    size_t line_bytes, left;
} chunks;

// Gives the body's bytes to `sink`; 0 once the body has ended.
static int take_chunks(const unsigned char *data, size_t length, void (*sink)(const unsigned char *, size_t)) {
    while (length && chunks.state != BODY_ENDED) {
        if (chunks.state == IN_CHUNK) {
            size_t piece = length < chunks.left ? length : chunks.left;
            sink(data, piece);
            data += piece, length -= piece, chunks.left -= piece;
            if (!chunks.left) chunks.state = AFTER_CHUNK;
            continue;
        }
        char c = (char)*data++;
        length--;
        if (c != '\n') {
            if (c != '\r' && chunks.line_bytes < sizeof chunks.line - 1) chunks.line[chunks.line_bytes++] = c;
            continue;
        }
        chunks.line[chunks.line_bytes] = 0;
        if (chunks.state == SIZE_LINE) {
            chunks.left = strtoul(chunks.line, NULL, 16);
            chunks.state = chunks.left ? IN_CHUNK : TRAILERS;
        } else if (chunks.state == AFTER_CHUNK) {
            chunks.state = SIZE_LINE;
        } else if (!chunks.line_bytes) {
            chunks.state = BODY_ENDED;
        }
        chunks.line_bytes = 0;
    }
    return chunks.state != BODY_ENDED;
}

static void read_stream(void) {
    static unsigned char data[READ_BYTES + 1];
    int fd = connected(0), in_body = 0, chunked = 0, status = 0;
    size_t length, got = 0;
    struct timeval limit = {.tv_sec = (time_t)stall_sec};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    char *request = request_for(0, &length);
    uint64_t begin_ns = now_ns(), first_ns = 0;
    if (send(fd, request, length, MSG_NOSIGNAL) != (ssize_t)length) fail("send");
    while (!stream.ended) {
        ssize_t more = recv(fd, data + got, READ_BYTES - got, 0);
        if (more < 0) fail("recv");
        if (more == 0) break;
        got += (size_t)more;
        unsigned char *at = data;
        if (!in_body) {
            data[got] = 0;
            char *end = strstr((char *)data, "\r\n\r\n");
            if (!end) continue;
            if (sscanf((char *)data, "HTTP/1.1 %d", &status) != 1 || status != 200) {
                fprintf(stderr, "load: %.400s\n", (char *)data);
                exit(2);
            }
            *end = 0, chunked = strcasestr((char *)data, "\r\nTransfer-Encoding: chunked") != NULL;
            at = (unsigned char *)end + 4, in_body = 1;
        }
        size_t bytes = got - (size_t)(at - data);
        if (chunked) {
            if (!take_chunks(at, bytes, take_frames)) break;
        } else {
            take_frames(at, bytes);
        }
        if (!first_ns && stream.out_bytes + stream.err_bytes) first_ns = now_ns();
        got = 0;
    }
    uint64_t end_ns = now_ns();
    stream.exit_json[stream.exit_bytes] = 0;
    printf("{\"stdout_bytes\":%lu,\"stderr_bytes\":%lu,\"seconds\":%.6f,\"first_byte_us\":%.1f,\"gaps\":%lu,"
           "\"misplaced\":%lu,\"heartbeats\":%lu,\"ended\":%s,\"exit\":%s}\n",
           stream.out_bytes, stream.err_bytes, (double)(end_ns - begin_ns) / 1e9,
           first_ns ? (double)(first_ns - begin_ns) / 1e3 : 0.0, stream.gaps, stream.misplaced, stream.heartbeats,
           stream.ended ? "true" : "false", stream.exit_bytes ? stream.exit_json : "null");
}

// ── long answers and long bodies, one after the other ──────────────────────────────────────────────────────────

static unsigned char pattern[PATTERN_BYTES];
static long body_bytes;
static int differs, begins_bytes;
static char begins[310];  // status and the first bytes of the answer at hand

static void make_pattern(void) {
    uint64_t state = 88172645463325252u;
    for (long i = 0; i < PATTERN_BYTES; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        pattern[i] = (unsigned char)state;
    }
}

static void take_bulk(const unsigned char *data, size_t length) {
    while (verify && length) {
        long at = body_bytes % PATTERN_BYTES;
        size_t piece = length < (size_t)(PATTERN_BYTES - at) ? length : (size_t)(PATTERN_BYTES - at);
        differs |= memcmp(data, pattern + at, piece) != 0;
        data += piece, length -= piece, body_bytes += (long)piece;
    }
    body_bytes += (long)length;
}

static void send_bulk(int fd, const char *request, size_t length) {
    if (send(fd, request, length, MSG_NOSIGNAL) != (ssize_t)length) fail("send");
    for (long left = upload_bytes, at = 0; left > 0;) {
        long piece = PATTERN_BYTES - at < left ? PATTERN_BYTES - at : left;
        ssize_t done = send(fd, pattern + at, (size_t)piece, MSG_NOSIGNAL);
        if (done < 0) fail("send");
        left -= done, at = (at + done) % PATTERN_BYTES;
    }
}

// Reads one answer; when its first byte came, or 0 where it has none. `*whole` is 0 where it broke off.
static uint64_t read_bulk(int fd, int *status, int *last, int *whole) {
    static unsigned char data[READ_BYTES + 1];
    size_t got = 0;
    long length = -1;
    int in_body = 0, chunked = 0;
    uint64_t first_ns = 0;
    memset(&chunks, 0, sizeof chunks);
    body_bytes = 0, *whole = 0;
    for (;;) {
        ssize_t more = recv(fd, data + got, READ_BYTES - got, 0);
        if (more < 0) fail("recv");
        if (more == 0) {  // the end of a body without a length, or a broken one
            *whole = in_body && !chunked && length < 0, *last = 1;
            return first_ns;
        }
        got += (size_t)more;
        unsigned char *at = data;
        if (!in_body) {
            data[got] = 0;
            char *end = strstr((char *)data, "\r\n\r\n");
            if (!end) continue;
            if (sscanf((char *)data, "HTTP/1.%*d %d", status) != 1) fail("the answer is no HTTP");
            *last = is_last((char *)data);
            *end = 0;
            char *sized = strcasestr((char *)data, "\r\nContent-Length:");
            if (sized) length = strtol(sized + 17, NULL, 10);
            chunked = strcasestr((char *)data, "\r\nTransfer-Encoding: chunked") != NULL;
            at = (unsigned char *)end + 4, in_body = 1;
        }
        size_t bytes = got - (size_t)(at - data);
        if (!body_bytes) begins_bytes = snprintf(begins, sizeof begins, "%d %.*s", *status, bytes < 300 ? (int)bytes : 300, at);
        int ended = chunked ? !take_chunks(at, bytes, take_bulk) : (take_bulk(at, bytes), length >= 0 && body_bytes >= length);
        if (!first_ns && body_bytes) first_ns = now_ns();
        if (ended) {
            *whole = length < 0 || body_bytes == length;
            return first_ns;
        }
        got = 0;
    }
}

static void transfer(void) {
    long count = request_count ? request_count : 1;
    uint64_t *first_ns = calloc((size_t)count, sizeof *first_ns), total_ns = 0;
    long total_bytes = 0, with_bytes = 0;
    int fd = -1, last = 0;
    size_t length;
    char *request = request_for(0, &length);
    struct timeval limit = {.tv_sec = (time_t)stall_sec};
    if (!first_ns || !(latencies_ns = calloc((size_t)count, sizeof *latencies_ns))) fail("memory");
    make_pattern();
    for (long i = 0; i < count; i++) {
        int status = 0, whole = 0;
        if (fd < 0) {
            fd = connected(0);
            setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
            setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        }
        uint64_t begin_ns = now_ns();
        send_bulk(fd, request, length);
        uint64_t at_ns = read_bulk(fd, &status, &last, &whole);
        latencies_ns[measured++] = now_ns() - begin_ns;
        total_ns += latencies_ns[i], total_bytes += upload_bytes > 0 ? upload_bytes : body_bytes;
        if (at_ns) first_ns[with_bytes++] = at_ns - begin_ns;
        if (status < 200 || status >= 300) wrong("status", begins, begins_bytes);
        else if (!whole) wrong("the answer broke off", "", 0);
        else if (expect_bytes >= 0 && body_bytes != expect_bytes) wrong("not as many bytes as expected", begins, begins_bytes);
        else if (differs) wrong("other bytes than were sent", "", 0);
        if (last) {
            close(fd);
            fd = -1;
        }
    }
    qsort(first_ns, (size_t)with_bytes, sizeof *first_ns, by_size);
    qsort(latencies_ns, (size_t)measured, sizeof *latencies_ns, by_size);
    printf("{\"requests\":%ld,\"errors\":%ld,\"bytes\":%ld,\"seconds\":%.6f,\"p50_us\":%.1f,\"first_byte_p50_us\":%.1f,"
           "\"first_error\":\"%s\"}\n",
           count, errors, total_bytes, (double)total_ns / 1e9, percentile_us(0.5),
           with_bytes ? (double)first_ns[with_bytes / 2] / 1e3 : 0.0, first_error);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        int *flag = !strcmp(name, "--frames")             ? &frames
                    : !strcmp(name, "--bulk")             ? &bulk
                    : !strcmp(name, "--verify")           ? &verify
                    : !strcmp(name, "--until-stdin-ends") ? &until_stdin_ends
                                                          : NULL;
        if (flag) {
            *flag = 1;
            continue;
        }
        if (++i >= argc) fail(name);
        const char *value = argv[i];
        if (!strcmp(name, "--tcp")) port = value;
        else if (!strcmp(name, "--unix")) unix_path = value;
        else if (!strcmp(name, "--connections")) connection_count = atoi(value);
        else if (!strcmp(name, "--seconds")) measure_sec = atof(value);
        else if (!strcmp(name, "--warmup")) warmup_sec = atof(value);
        else if (!strcmp(name, "--count")) request_count = atol(value);
        else if (!strcmp(name, "--expect-bytes")) expect_bytes = atol(value);
        else if (!strcmp(name, "--upload")) upload_bytes = atol(value);
        else if (!strcmp(name, "--method")) method = value;
        else if (!strcmp(name, "--path")) path = value;
        else if (!strcmp(name, "--body")) body = value;
        else if (!strcmp(name, "--expect")) expect = value;
        else if (!strcmp(name, "--pace-ms")) pace_ms = atof(value);
        else if (!strcmp(name, "--stall-sec")) stall_sec = atof(value);
        else if (!strcmp(name, "--header")) {
            size_t used = strlen(headers);
            snprintf(headers + used, sizeof headers - used, "%s\r\n", value);
        } else fail(name);
    }
    if (!port == !unix_path || connection_count < 1 || connection_count > MAX_CONNECTIONS) fail("one of --tcp and --unix");
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    if (frames) read_stream();
    else if (bulk) transfer();
    else load();
    return 0;
}
