// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// TestDNSAwayDecidesAboutTCP: while sluice-dns does not run, dns.away decides about connections for restricted names,
// too. The next process evaluates them again.
func TestDNSAwayDecidesAboutTCP(t *testing.T) {
	t.Parallel()
	for _, away := range []string{"drop", "pass"} {
		t.Run(away, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, func(o *devnode.Options) {
				o.Args = map[string][]string{devnode.Policy: {"--dns-away=" + away}}
			})
			pods := n.addPods(t, "client", "dns")
			client, server := pods[0], netip.AddrPortFrom(pods[1].IPv4, 5353)
			s := n.nameServer(t)
			s.listenTCP(t, pods[1], server)
			enforce(t, n.policies(t), streamPolicy)
			if code, _, err := askByTCP(dialDNS(t, client, server), "blocked.test.", dnsmessage.TypeA); err != nil ||
				code != dnsmessage.RCodeRefused {
				t.Fatalf("before: %v, %v", code, err)
			}
			flows := n.observe(t, &datapathv1.ObserveRequest{
				Reasons: []datapathv1.Reason{datapathv1.Reason_REASON_PROXY_AWAY},
			})
			ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
			defer cancel()
			if err := n.Kill(ctx, devnode.DNS); err != nil {
				t.Fatal(err)
			}
			if away == "pass" {
				if _, err := askAnew(ctx, client, server, "blocked.test.", dnsmessage.TypeA); err != nil {
					t.Errorf("with dns.away pass: %v", err)
				}
				if s.queries("blocked.test.") == 0 {
					t.Error("the server has no query")
				}
			} else {
				var dialed sync.WaitGroup
				limited, end := context.WithCancel(ctx)
				dialed.Go(func() {
					for limited.Err() == nil {
						short, done := context.WithTimeout(limited, 2*time.Second)
						if c, err := client.Dial(short, server); err == nil {
							// It waits for the next process.
							_ = writeDNS(c, queryFor(7, "blocked.test.", dnsmessage.TypeA))
							_ = c.Close()
						}
						done()
					}
				})
				flows.waitFrom(t, 0, "a dropped connection", func(f *datapathv1.Flow) bool {
					return f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED && isFlow(f, client.IPv4, server.Addr(), server.Port())
				})
				end()
				dialed.Wait()
				if got := s.queries("blocked.test."); got > 0 {
					t.Errorf("the server has %d queries", got)
				}
			}
			if err := n.Start(ctx, devnode.DNS); err != nil {
				t.Fatal(err)
			}
			n.awaitProxy(t)
			servicetest.EventuallyNil(t, "names are refused again", func() error {
				c, err := client.Dial(ctx, server)
				if err != nil {
					return err
				}
				defer c.Close()
				code, _, err := askByTCP(c, "blocked.test.", dnsmessage.TypeA)
				if err == nil && code != dnsmessage.RCodeRefused {
					err = fmt.Errorf("blocked.test: %v", code)
				}
				return err
			})
		})
	}
}

// TestFaultKillPolicyWhileAnswersAreHeld stops sluice-policy, so that answers with new addresses are held, and kills
// it. The resolvers get their answers, and the names teach again once the process is back.
func TestFaultKillPolicyWhileAnswersAreHeld(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	server := netip.AddrPortFrom(s.world.IPv4, 53)
	_, known, err := newResolver(t, client, server).ask("known.service.example.", dnsmessage.TypeA, 3)
	if err != nil || len(known) != 1 {
		t.Fatalf("%v, %v", known, err)
	}
	for round := range 3 {
		pid, err := n.PID(devnode.Policy)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		var asked sync.WaitGroup
		for i := range 20 {
			r := newResolver(t, client, server)
			asked.Go(func() {
				name := fmt.Sprintf("h%d-%d.service.example.", round, i)
				code, addresses, err := r.ask(name, dnsmessage.TypeA, 10)
				if err != nil || code != dnsmessage.RCodeSuccess || len(addresses) != 1 {
					t.Errorf("%s: %v, %v, %v", name, code, addresses, err)
				}
			})
		}
		servicetest.Eventually(t, "the server has answered", func() bool {
			return s.queries(fmt.Sprintf("h%d-19.service.example.", round)) > 0
		})
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		if err := errors.Join(n.Kill(ctx, devnode.Policy), n.Start(ctx, devnode.Policy)); err != nil {
			t.Fatalf("restart %s: %v", devnode.Policy, err)
		}
		asked.Wait()
		wantOpen(t, client, known[0])
		servicetest.EventuallyNil(t, "an answer teaches", func() error {
			r := newResolver(t, client, server)
			_, addresses, err := r.ask(fmt.Sprintf("h%d-0.service.example.", round), dnsmessage.TypeA, 3)
			if err != nil || len(addresses) != 1 {
				return fmt.Errorf("%v, %w", addresses, err)
			}
			short, end := context.WithTimeout(ctx, 2*time.Second)
			defer end()
			return talk(short, client, netip.AddrPortFrom(addresses[0], servedPort))
		})
		cancel()
	}
}

// TestChainsCaseEDNSTruncationAndTCP: a resolver asks with EDNS and in mixed letters, as some do against forgery. The
// server's answer over UDP is truncated, and its answer over TCP has a chain of aliases. Both arrive as the server has
// sent them, and only the second one teaches.
func TestChainsCaseEDNSTruncationAndTCP(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	s := &nameServer{world: n.outside(t)}
	target := rotating4.Addr().Next().Next()
	var mu sync.Mutex
	var sent []byte // guarded by mu
	pack := func(m dnsmessage.Message) []byte {
		b, err := m.Pack()
		if err != nil {
			t.Errorf("pack an answer: %v", err)
		}
		mu.Lock()
		defer mu.Unlock()
		sent = b
		return b
	}
	s.forge = func(query dnsmessage.Message, _ netip.AddrPort, send func([]byte)) bool {
		query.Response, query.Truncated = true, true
		send(pack(query))
		return true
	}
	s.stream = func(query dnsmessage.Message) []byte {
		question := query.Questions[0].Name.String()
		query.Response = true
		query.Answers = []dnsmessage.Resource{
			alias(question, "A.Cdn.Example.net."), alias("a.cdn.example.NET.", "b.example.org."),
			addressRecord("B.example.org.", target),
		}
		return pack(query)
	}
	n.awaitProxy(t)
	s.start(t, n)
	server := netip.AddrPortFrom(s.world.IPv4, 53)
	s.listenTCP(t, s.world, server)
	enforce(t, n.policies(t), streamPolicy)

	const name = "bIg.SeRviCe.eXamPle."
	query := queryFor(9, name, dnsmessage.TypeA)
	var h dnsmessage.ResourceHeader
	var m dnsmessage.Message
	if err := errors.Join(m.Unpack(query), h.SetEDNS0(1232, dnsmessage.RCodeSuccess, true)); err != nil {
		t.Fatal(err)
	}
	m.Additionals = []dnsmessage.Resource{{Header: h, Body: &dnsmessage.OPTResource{
		Options: []dnsmessage.Option{{Code: 10, Data: []byte("8 bytes.")}}, // a cookie
	}}}
	query, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	unchanged := func(how string, got []byte, err error) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if err != nil || string(got) != string(sent) || !strings.Contains(string(got), "8 bytes.") {
			t.Errorf("%s: got % x, %v, want % x", how, got, err, sent)
		}
	}
	r := newResolver(t, client, server)
	buf := make([]byte, 2048)
	if _, err := r.c.Write(query); err != nil {
		t.Fatal(err)
	}
	_ = r.c.SetReadDeadline(time.Now().Add(patience))
	size, err := r.c.Read(buf)
	unchanged("over UDP", buf[:size], err)
	wantClosed(t, client, target)

	c := dialDNS(t, client, server)
	// In two segments, of which the first ends in the length of the message.
	whole := append(binary.BigEndian.AppendUint16(nil, uint16(len(query))), query...)
	_ = c.SetDeadline(time.Now().Add(patience))
	for _, part := range [][]byte{whole[:1], whole[1:]} {
		if _, err := c.Write(part); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // so that the parts are segments
	}
	got, err := readDNS(c)
	unchanged("over TCP", got, err)
	wantOpen(t, client, target)
}

// getaddrinfo prints the first IPv4 address of a name, or the error of the C library.
const getaddrinfo = `
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) {
	struct addrinfo hints, *found;
	char text[INET_ADDRSTRLEN];
	memset(&hints, 0, sizeof hints);
	hints.ai_family = AF_INET;
	hints.ai_socktype = SOCK_STREAM;
	int err = getaddrinfo(argv[argc - 1], 0, &hints, &found);
	if (err) {
		printf("error: %s\n", gai_strerror(err));
		return 1;
	}
	puts(inet_ntop(AF_INET, &((struct sockaddr_in *)found->ai_addr)->sin_addr, text, sizeof text));
	return 0;
}
`

// TestSearchDomainsGetNXDOMAIN resolves names with the C libraries of Debian and Alpine, and the search domains of a
// pod in Kubernetes. The refused names below the cluster domain do not end the search, and do not leave the node.
func TestSearchDomainsGetNXDOMAIN(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	client := n.addPods(t, "client")[0]
	s := n.nameServer(t)
	enforce(t, n.policies(t), namesPolicy)
	dir := t.TempDir()
	source, resolv := filepath.Join(dir, "resolve.c"), filepath.Join(dir, "resolv.conf")
	if err := errors.Join(
		os.WriteFile(source, []byte(getaddrinfo), 0o600),
		//nolint:gosec // the resolver reads it
		os.WriteFile(resolv, fmt.Appendf(nil, "nameserver %s\n"+
			"search test.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n", s.world.IPv4), 0o644),
	); err != nil {
		t.Fatal(err)
	}
	for library, compiler := range map[string]string{"glibc": "gcc", "musl": "musl-gcc"} {
		t.Run(library, func(t *testing.T) {
			program := filepath.Join(dir, library)
			if out, err := exec.CommandContext(t.Context(), compiler, "-o", program, source).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", compiler, err, out)
			}
			name := library + ".service.example"
			ctx, cancel := deadline(t)
			defer cancel()
			out, err := exec.CommandContext(ctx, "nsenter", "--net="+client.Netns, "unshare", "--mount", "sh", "-c",
				`mount --no-mtab --bind "$1" /etc/resolv.conf && exec "$2" "$3"`, "sh", resolv, program, name).CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			a, err := netip.ParseAddr(strings.TrimSpace(string(out)))
			if err != nil || !rotating4.Contains(a) {
				t.Fatalf("%s is %s, %v", name, out, err)
			}
			wantOpen(t, client, a)
			for _, domain := range []string{"test.svc.cluster.local.", "svc.cluster.local.", "cluster.local."} {
				if got := s.queries(name + "." + domain); got > 0 {
					t.Errorf("the server has %d queries for %s.%s", got, name, domain)
				}
			}
		})
	}
}
