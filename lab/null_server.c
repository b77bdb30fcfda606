/* A server that costs next to nothing, to see what clients cost. One thread, epoll.
 *
 *   gcc -O2 -o null_server lab/null_server.c && ./null_server [PORT]     prints its port; 0 or none: any free one
 *
 * It answers POSTs in the way that the beginning of the path says:
 *   /plain   a chat completion of 64 tokens as one JSON object
 *   /whole   a stream of 64 tokens, all in one write
 *   /fast    a stream of 64 tokens, each in a write of its own, as fast as it can
 *   /paced   the first token 20 ms after the request, then one every 5 ms, each at its instant however late the last was
 * Without such a beginning: /fast for a body that asks for a stream, else /plain. GETs are answered as /v1/models, but
 *   /rows    what it saw since the last /rows: three 64-bit numbers in this machine's order for each request, which are
 *            the instants (CLOCK_MONOTONIC, ns) at which it was whole, the first token went out and the last bytes did
 * It ends when its standard input does, so that it never outlives whoever started it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS = 64, MAX_FD = 65536, IN_BYTES = 1 << 16, MAX_ROWS = 1 << 20, FIRST_NS = 20000000, GAP_NS = 5000000 };

struct conn {
  int fd, used, skip; /* skip: bytes of a long body still to be read past */
  int left;           /* frames of a paced stream still to be sent */
  uint64_t due, id;
  uint32_t row, turn; /* where its request is noted, and since which /rows */
  char *in;
};
struct entry {
  int fd;
  uint64_t id;
};
/* Two waits are possible, and each is the same for all: a queue for either is in the order of its instants. */
struct queue {
  struct entry *at;
  uint32_t head, tail;
};

struct row {
  uint64_t whole, first, end;
};

static struct conn conns[MAX_FD];
static struct row *rows;
static uint32_t num_rows, turn;
static struct queue firsts, gaps;
static uint64_t next_id = 1;
static char plain[2048], whole[1 << 16], models[2048], head[256];
static size_t plain_n, whole_n, models_n, head_n;
static char frame[2048], last[2048];
static size_t frame_n, last_n;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static void push(struct queue *q, int fd) { q->at[q->tail++ & (MAX_FD - 1)] = (struct entry){fd, conns[fd].id}; }

static size_t chunk(char *out, const char *data) {
  return sprintf(out, "%zx\r\n%s\r\n", strlen(data), data);
}

static void make_answers(void) {
  const char *usage = "\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":64,\"total_tokens\":84}";
  char data[1024], body[1024];
  snprintf(data, sizeof data,
           "data: {\"id\":\"chatcmpl-null\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"null\","
           "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
  frame_n = chunk(frame, data);
  snprintf(data, sizeof data,
           "data: {\"id\":\"chatcmpl-null\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"null\","
           "\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n"
           "data: {\"id\":\"chatcmpl-null\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"null\","
           "\"choices\":[],%s}\n\ndata: [DONE]\n\n", usage);
  last_n = chunk(last, data);
  last_n += sprintf(last + last_n, "0\r\n\r\n");
  head_n = sprintf(head, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
  memcpy(whole, head, head_n);
  whole_n = head_n;
  for (int i = 0; i < TOKENS; i++, whole_n += frame_n) memcpy(whole + whole_n, frame, frame_n);
  memcpy(whole + whole_n, last, last_n);
  whole_n += last_n;
  size_t n = snprintf(body, sizeof body,
           "{\"id\":\"chatcmpl-null\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"null\",\"choices\":"
           "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"some words\"},\"finish_reason\":\"length\"}],%s}",
           usage);
  plain_n = sprintf(plain, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", n, body);
  n = snprintf(body, sizeof body, "{\"object\":\"list\",\"data\":[{\"id\":\"null\",\"object\":\"model\"}]}");
  models_n = sprintf(models, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", n, body);
}

static void drop(struct conn *c) {
  close(c->fd);
  c->id = 0;
  c->left = 0;
}

/* What a client does not take at once it does not get: it would be the bottleneck, and the figures tell. */
static int put(struct conn *c, const char *data, size_t n) {
  while (n) {
    ssize_t sent = write(c->fd, data, n);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR) continue;
      drop(c);
      return 0;
    }
    data += sent;
    n -= sent;
  }
  return 1;
}

static struct row *row_of(struct conn *c) {
  static struct row none;
  return c->turn == turn && c->row < MAX_ROWS ? &rows[c->row] : &none;
}

static void put_rows(struct conn *c) {
  size_t n = (num_rows < MAX_ROWS ? num_rows : MAX_ROWS) * sizeof *rows;
  char start[128];
  if (put(c, start, sprintf(start, "HTTP/1.1 200 OK\r\ncontent-length: %zu\r\n\r\n", n))) put(c, (char *)rows, n);
  memset(rows, 0, n);
  num_rows = 0;
  turn++;
}

static void answer(struct conn *c, const char *request, size_t n) {
  const char *path = memchr(request, ' ', n);
  if (path && !strncmp(request, "GET", 3) && !strncmp(path + 1, "/rows", 5)) { put_rows(c); return; }
  if (!path || !strncmp(request, "GET", 3)) { put(c, models, models_n); return; }
  path++;
  c->row = num_rows++;
  c->turn = turn;
  struct row *row = row_of(c);
  row->whole = row->first = now_ns();
  int streamed = memmem(request, n, "\"stream\":true", 13) || memmem(request, n, "\"stream\": true", 14);
  if (!strncmp(path, "/paced", 6)) {
    c->due = row->whole + FIRST_NS;
    c->left = TOKENS;
    put(c, head, head_n) ? push(&firsts, c->fd) : (void)0;
    return;
  } else if (!strncmp(path, "/whole", 6)) {
    put(c, whole, whole_n);
  } else if (!strncmp(path, "/plain", 6) || (strncmp(path, "/fast", 5) && !streamed)) {
    put(c, plain, plain_n);
  } else {
    if (!put(c, head, head_n)) return;
    for (int i = 0; i < TOKENS; i++)
      if (!put(c, frame, frame_n)) return;
    put(c, last, last_n);
  }
  row->end = now_ns();
}

/* Whole requests in what has been read. Bodies longer than the buffer are read past: only their beginning is looked at. */
static void take(struct conn *c) {
  for (;;) {
    if (c->skip) {
      int part = c->skip < c->used ? c->skip : c->used;
      memmove(c->in, c->in + part, c->used -= part);
      if (c->skip -= part) return;
    }
    char *end = memmem(c->in, c->used, "\r\n\r\n", 4);
    if (!end) return;
    size_t n = end + 4 - c->in;
    *end = 0;
    char *length = strcasestr(c->in, "\r\ncontent-length:");
    size_t body = length ? strtoul(length + 17, 0, 10) : 0;
    *end = '\r';
    size_t here = n + body < (size_t)c->used ? n + body : (size_t)c->used;
    if (here < n + body && c->used < IN_BYTES - 1) return;
    uint64_t id = c->id;
    answer(c, c->in, here);
    if (c->id != id) return;
    c->skip = n + body - here;
    memmove(c->in, c->in + here, c->used -= here);
  }
}

static void run_queue(struct queue *q, uint64_t now, int limit) {
  for (; q->head != q->tail && limit; q->head++, limit--) {
    struct entry e = q->at[q->head & (MAX_FD - 1)];
    struct conn *c = &conns[e.fd];
    if (c->id != e.id || !c->left) continue;
    if (c->due > now) return;
    if (c->left == TOKENS) row_of(c)->first = now_ns();
    if (!put(c, frame, frame_n)) continue;
    if (--c->left) {
      c->due += GAP_NS;
      push(&gaps, c->fd);
    } else if (put(c, last, last_n)) {
      row_of(c)->end = now_ns();
    }
  }
}

static int64_t wait_ns(uint64_t now) {
  int64_t least = -1;
  struct queue *queues[] = {&firsts, &gaps};
  for (int i = 0; i < 2; i++) {
    struct queue *q = queues[i];
    while (q->head != q->tail && conns[q->at[q->head & (MAX_FD - 1)].fd].id != q->at[q->head & (MAX_FD - 1)].id) q->head++;
    if (q->head == q->tail) continue;
    int64_t left = (int64_t)(conns[q->at[q->head & (MAX_FD - 1)].fd].due - now);
    if (left < 0) left = 0;
    if (least < 0 || left < least) least = left;
  }
  return least;
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  struct rlimit most;
  getrlimit(RLIMIT_NOFILE, &most);
  most.rlim_cur = most.rlim_max;
  setrlimit(RLIMIT_NOFILE, &most);
  make_answers();
  firsts.at = calloc(MAX_FD, sizeof *firsts.at);
  gaps.at = calloc(MAX_FD, sizeof *gaps.at);
  rows = calloc(MAX_ROWS, sizeof *rows);
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1, poll = epoll_create1(0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 0)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  socklen_t size = sizeof address;
  if (bind(listener, (void *)&address, size) || listen(listener, 4096)) { perror("null_server"); return 1; }
  getsockname(listener, (void *)&address, &size);
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[256];
  epoll_ctl(poll, EPOLL_CTL_ADD, listener, &event);
  event.data.fd = 0;
  epoll_ctl(poll, EPOLL_CTL_ADD, 0, &event); /* fails for a file, which never ends */
  for (;;) {
    int64_t wait = wait_ns(now_ns());
    struct timespec timeout = {wait / 1000000000, wait % 1000000000};
    int n = syscall(SYS_epoll_pwait2, poll, events, 256, wait < 0 ? 0 : &timeout, 0, 0);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd == 0) {
        char byte;
        if (read(0, &byte, 1) <= 0) return 0;
      } else if (fd == listener) {
        int accepted;
        while ((accepted = accept4(listener, 0, 0, SOCK_NONBLOCK)) >= 0) {
          if (accepted >= MAX_FD) { close(accepted); continue; }
          setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
          struct conn *c = &conns[accepted];
          char *in = c->in ? c->in : malloc(IN_BYTES);
          *c = (struct conn){.fd = accepted, .in = in, .id = next_id++};
          event.events = EPOLLIN;
          event.data.fd = accepted;
          epoll_ctl(poll, EPOLL_CTL_ADD, accepted, &event);
        }
      } else {
        struct conn *c = &conns[fd];
        ssize_t got = read(fd, c->in + c->used, IN_BYTES - 1 - c->used);
        if (got > 0) {
          c->used += got;
          c->in[c->used] = 0;
          take(c);
        } else if (got == 0 || errno != EAGAIN) {
          drop(c);
        }
      }
    }
    uint64_t now = now_ns();
    run_queue(&firsts, now, 256);
    run_queue(&gaps, now, 256);
  }
}
