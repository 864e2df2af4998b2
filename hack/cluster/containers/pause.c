/* Holds a pod's namespaces: waits until it is told to end. */
#include <signal.h>
#include <unistd.h>

static void end(int signal) { _exit(0); }

int main(void) {
  signal(SIGTERM, end);
  signal(SIGINT, end);
  for (;;) pause();
}
