/* A closed loop that does nothing but send and count bytes, to see what the null server can give. One thread, epoll.
 *
 *   gcc -O2 -o null_client lab/null_client.c && ./null_client PORT PATH USERS COUNT
 *
 * Every answer of a path is equally long: the first tells how long. Ends after COUNT more and prints how many came a
 * second, and how much of a core it used for them.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_USERS = 4096, BUFFER_BYTES = 1 << 18, PATIENCE_MS = 60000 };

static char request[2048], buffer[BUFFER_BYTES];
static int request_n;
static size_t got[MAX_USERS + 1024];
static int fds[MAX_USERS];

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}

static double cpu_s(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static int connect_to(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  if (fd < 0 || connect(fd, (void *)&address, sizeof address)) { perror("null_client"); exit(1); }
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

static void ask(int fd) {
  if (write(fd, request, request_n) != request_n) { perror("null_client"); exit(1); }
}

/* Of the answer in `buffer`, of which there are n bytes so far: 0 as long as it is not whole. */
static size_t whole(size_t n) {
  buffer[n] = 0;
  char *end = strstr(buffer, "\r\n\r\n"), *told = strcasestr(buffer, "content-length: ");
  if (!end) return 0;
  size_t length = end + 4 - buffer;
  if (told && told < end) length += atol(told + strlen("content-length: "));
  else length = n > 5 && !memcmp(buffer + n - 5, "0\r\n\r\n", 5) ? n : n + 1;
  return n >= length ? n : 0;
}

static size_t length_of_answer(int port) {
  int fd = connect_to(port);
  struct pollfd wait = {fd, POLLIN, 0};
  size_t n = 0, length = 0;
  ask(fd);
  while (!length && n < BUFFER_BYTES - 1 && poll(&wait, 1, PATIENCE_MS) > 0) {
    ssize_t more = read(fd, buffer + n, BUFFER_BYTES - 1 - n);
    if (more <= 0) break;
    length = whole(n += more);
  }
  close(fd);
  return length;
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  int port = atoi(argv[1]), users = atoi(argv[3]);
  long count = atol(argv[4]), asked = 0, answers = 0;
  char body[1024] = "{\"model\":\"null\",\"messages\":[{\"role\":\"user\",\"content\":\"";
  for (int i = 0; i < 40; i++) strcat(body, "word ");
  strcat(body, "\"}],\"max_tokens\":64,\"stream\":true}");
  request_n = sprintf(request, "POST /%s/v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                               "content-length: %zu\r\n\r\n%s", argv[2], strlen(body), body);
  size_t length = length_of_answer(port);
  if (!length || users < 1 || users > MAX_USERS || count < users) { fprintf(stderr, "null_client: no answer\n"); return 1; }
  int poll = epoll_create1(0);
  struct epoll_event event = {.events = EPOLLIN}, events[256];
  for (int i = 0; i < users; i++) {
    event.data.fd = fds[i] = connect_to(port);
    epoll_ctl(poll, EPOLL_CTL_ADD, fds[i], &event);
  }
  double start = now_s(), cpu = cpu_s();
  for (; asked < users; asked++) ask(fds[asked]);
  while (answers < count) {
    int n = epoll_wait(poll, events, 256, PATIENCE_MS);
    if (n <= 0) { fprintf(stderr, "null_client: no answer\n"); return 1; }
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      ssize_t more = read(fd, buffer, sizeof buffer);
      if (more <= 0) { perror("null_client"); return 1; }
      got[fd] += more;
      if (got[fd] > length) { fprintf(stderr, "null_client: answers are not equally long\n"); return 1; }
      if (got[fd] == length) {
        got[fd] = 0;
        answers++;
        if (asked < count) { asked++; ask(fd); }
      }
    }
  }
  double span = now_s() - start;
  printf("%.1f %.3f\n", answers / span, (cpu_s() - cpu) / span);
}
