// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command demo shows Sluice at work. It starts a node with every service, and a real containerd that runs three pods
// through the CNI shim. It shows packets between the pods, the datapath's counters, network policies with an allowed
// and a denied connection, and a dropped packet with a forged source. Then it starts three nodes with one policy,
// kills the processes of one node, and finally removes everything. It announces each step in a line.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/client"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/cri"
	"github.com/sluice-net/sluice/test/internal/oci"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// instance is the name of the demo's node, which can run next to other nodes.
const instance = "demo"

func main() {
	binDir := flag.String("bin-dir", "bin", "directory of the programs that `make build` writes, with pause in test/")
	policies := flag.String("policies", "test/demo/policies", "directory of the manifests that are applied")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	// A reader that closes the pipe must not prevent the cleanup.
	signal.Ignore(unix.SIGPIPE)
	start := time.Now()
	if err := run(ctx, *binDir, *policies); err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
	fmt.Printf("\nDone in %.1f s. Next: README.md, or keep a node with `bin/sluice dev up`.\n",
		time.Since(start).Seconds())
}

type demo struct {
	binDir   string
	policies string // directory of manifests
	dir      string // containerd's
	node     *devnode.Node
	runtime  *cri.Runtime
	pods     []pod.Pod
	ids      []string // sandbox IDs of the pods, shortened
	number   int      // of the step
}

func run(ctx context.Context, binDir, policies string) error {
	if os.Geteuid() != 0 {
		return errors.New("must run as root: it makes network namespaces and loads eBPF programs")
	}
	binDir, err := filepath.Abs(binDir)
	if err != nil {
		return err
	}
	d := &demo{binDir: binDir, policies: policies}
	if err := d.runNode(ctx); err != nil {
		return err
	}
	return d.runNodes(ctx)
}

// runNode is the first part: one node.
func (d *demo) runNode(ctx context.Context) (err error) {
	defer func() {
		err = errors.Join(err, d.cleanUp())
	}()
	return d.steps(ctx, []step{
		{"Start a node: its own network namespace, etcd, and each Sluice service as its own user", d.startNode},
		{"Start a real containerd that calls sluice-cni for each pod, and run three pods over CRI", d.startPods},
		{"See what Sluice made of them: addresses from sluice-ipam, identities from sluice-identity", d.showEndpoints},
		{"Let the pods talk: ping and TCP both ways, IPv4 and IPv6, and what the eBPF programs counted", d.talk},
		{"Ask what two network policies would change; nothing does yet", d.comparePolicies},
		{"Apply them: when the command returns, the kernel enforces them", d.applyPolicies},
		{"Ask why the visitor was denied: the event, the policy service, and the kernel's own tables", d.explainDrop},
		{"Let one pod lie about its address: the datapath drops the packet and says why", d.lie},
		{"Ask a service directly: every socket speaks gRPC with reflection", d.grpcurl},
	})
}

// step is a line that announces an action, and the action.
type step struct {
	text string
	run  func(context.Context) error
}

func (d *demo) steps(ctx context.Context, steps []step) error {
	for _, s := range steps {
		d.title(s.text)
		if err := s.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) title(text string) {
	d.number++
	fmt.Printf("\n%d. %s.\n\n", d.number, text)
}

// show prints a command as a person would type it, runs it and prints its output.
func (d *demo) show(ctx context.Context, name string, args ...string) error {
	return d.showExit(ctx, 0, name, args...)
}

// showExit is show for a command that must end with the exit code.
func (d *demo) showExit(ctx context.Context, code int, name string, args ...string) error {
	fmt.Printf("   $ %s\n", strings.Join(append([]string{name}, quoted(args)...), " "))
	path := filepath.Join(d.binDir, name)
	if name == "grpcurl" {
		path = filepath.Join(d.binDir, "tools", name)
	}
	cmd := exec.CommandContext(ctx, path, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	for line := range strings.Lines(out.String()) {
		fmt.Printf("   %s\n", strings.TrimRight(line, "\n"))
	}
	fmt.Println()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == code:
		return nil
	case err == nil && code != 0:
		return fmt.Errorf("%s: exit status 0, want %d", name, code)
	case err != nil:
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func quoted(args []string) []string {
	out := slices.Clone(args)
	for i, a := range out {
		if strings.ContainsAny(a, " {}\"") {
			out[i] = "'" + a + "'"
		}
	}
	return out
}

func (d *demo) startNode(ctx context.Context) error {
	// Remove the node of an interrupted demo.
	if err := devnode.Down(ctx, instance); err != nil {
		return err
	}
	begin := time.Now()
	node, err := devnode.Up(ctx, devnode.Options{Instance: instance, BinDir: d.binDir, PolicyMode: "required"})
	if err != nil {
		return err
	}
	d.node = node
	fmt.Printf("   up in %.1f s\n", time.Since(begin).Seconds())
	for _, service := range devnode.Services() {
		pid, err := node.PID(service)
		if err != nil {
			return err
		}
		fmt.Printf("   sluice-%-12s  pid %-7d %s\n", service, pid, node.Socket(service))
	}
	return nil
}

func (d *demo) startPods(ctx context.Context) error {
	d.dir = fmt.Sprintf("/run/sluice-demo-cri-%d", os.Getpid())
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		return err
	}
	image := oci.Image{Name: "sluice.test/pause:1", Binary: filepath.Join(d.binDir, "test", "pause"), Entrypoint: "/pause"}
	archive := filepath.Join(d.dir, "pause.tar")
	if err := oci.WriteArchive(archive, image); err != nil {
		return err
	}
	runtime, err := cri.Start(ctx, cri.Options{
		Dir: d.dir, CNIPlugins: []string{d.node.Plugin()}, CNIConfig: d.node.CNIConflist(),
		PauseImage: archive, PauseImageName: image.Name,
	})
	if err != nil {
		return err
	}
	d.runtime = runtime
	for _, app := range []string{"web", "client", "visitor"} {
		labels := "app=" + app + ",tier=demo"
		begin := time.Now()
		sandbox, err := runtime.RunPod(ctx, "demo", app, map[string]string{"sluice.io/labels": labels})
		if err != nil {
			return err
		}
		addresses, err := pod.ParseAddresses(sandbox.IPs)
		if err != nil {
			return err
		}
		d.ids = append(d.ids, sandbox.ID[:12])
		d.pods = append(d.pods, pod.Pod{Name: app, Netns: sandbox.Netns}.WithAddresses(addresses))
		fmt.Printf("   pod demo/%-7s labels %s, sandbox %.12s, %s, in %d ms\n", app, labels, sandbox.ID,
			strings.Join(sandbox.IPs, " and "), time.Since(begin).Milliseconds())
	}
	return nil
}

func (d *demo) showEndpoints(ctx context.Context) error {
	if err := d.show(ctx, "sluice", "--instance", instance, "endpoint", "list"); err != nil {
		return err
	}
	return d.show(ctx, "sluice", "--instance", instance, "identity", "list")
}

func (d *demo) talk(ctx context.Context) error {
	before, err := d.counters(ctx)
	if err != nil {
		return err
	}
	message := bytes.Repeat([]byte("sluice "), 10000)
	for _, way := range []struct{ from, to pod.Pod }{{d.pods[1], d.pods[0]}, {d.pods[0], d.pods[1]}} {
		for _, address := range way.to.Addresses() {
			rtt, ttl, err := way.from.Ping(ctx, address)
			if err != nil {
				return err
			}
			begin := time.Now()
			if err := pod.ExchangeTCP(ctx, way.from, way.to, address, message); err != nil {
				return err
			}
			fmt.Printf("   %-6s → %-6s %-18s ping %d µs, ttl %d; TCP: %d bytes there and back in %.1f ms\n", way.from.Name,
				way.to.Name, address,
				rtt.Microseconds(), ttl, len(message), float64(time.Since(begin).Microseconds())/1000)
		}
	}
	after, err := d.counters(ctx)
	if err != nil {
		return err
	}
	fmt.Println()
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "   PACKETS\tBEFORE\tAFTER\tVERDICT")
	for _, reason := range reasons(before, after) {
		fmt.Fprintf(w, "   %s\t%d\t%d\t%s\n", reason, before[reason].packets, after[reason].packets, after[reason].verdict)
	}
	return w.Flush()
}

type counter struct {
	packets uint64
	verdict string
}

func reasons(sets ...map[string]counter) []string {
	var all []string
	for _, set := range sets {
		for reason := range set {
			if !slices.Contains(all, reason) {
				all = append(all, reason)
			}
		}
	}
	sort.Strings(all)
	return all
}

func (d *demo) counters(ctx context.Context) (map[string]counter, error) {
	conn, err := client.Dial(d.node.Socket(devnode.Datapath), client.Options{})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	status, err := datapathv1.NewDatapathServiceClient(conn).GetStatus(ctx, &datapathv1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	all := make(map[string]counter)
	for _, c := range status.GetPacketCounters() {
		if c.GetPackets() == 0 {
			continue
		}
		reason := strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(c.GetReason().String(), "REASON_"), "_", "-"))
		sum := all[reason]
		sum.packets += c.GetPackets()
		sum.verdict = "forwarded"
		if c.GetDropped() {
			sum.verdict = "dropped"
		}
		all[reason] = sum
	}
	return all, nil
}

func (d *demo) lie(ctx context.Context) error {
	liar, victim := d.pods[1], d.pods[0]
	fake := netip.MustParseAddr("198.51.100.7")
	fmt.Printf("   pod %s (%s) sends a UDP datagram to %s as %s\n\n", liar.Name, liar.IPv4, victim.IPv4, fake)
	before, err := d.counters(ctx)
	if err != nil {
		return err
	}
	if err := liar.SendFrom(fake, netip.AddrPortFrom(victim.IPv4, 53), []byte("trust me")); err != nil {
		return err
	}
	const reason = "spoofed-ip"
	for {
		after, err := d.counters(ctx)
		if err != nil {
			return err
		}
		if after[reason].packets > before[reason].packets {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the datapath did not count the packet as %s: %w", reason, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return d.show(ctx, "sluice", "--instance", instance, "observe", "--since", "1m", "--reason", reason)
}

func (d *demo) grpcurl(ctx context.Context) error {
	// The authority must be a valid name; by default grpcurl would send the socket's path.
	base := []string{"-plaintext", "-unix", "-authority", "localhost"}
	if err := d.show(ctx, "grpcurl", append(base, d.node.Socket(devnode.IPAM), "list")...); err != nil {
		return err
	}
	return d.show(ctx, "grpcurl", append(base, d.node.Socket(devnode.IPAM), "sluice.ipam.v1.IPAMService/ListPools")...)
}

// cleanUp removes the pods, containerd and the node, and verifies that all are removed.
func (d *demo) cleanUp() error {
	d.title("Clean up: remove the pods, end containerd and the node")
	var errs []error
	if d.runtime != nil {
		errs = append(errs, d.runtime.Close())
	}
	if d.dir != "" {
		errs = append(errs, os.RemoveAll(d.dir))
	}
	if d.node != nil {
		errs = append(errs, d.node.Down(context.Background()))
		for _, path := range []string{d.node.Netns(), d.node.Paths().RunDir, d.node.Paths().StateDir} {
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				errs = append(errs, fmt.Errorf("%s is left: %w", path, err))
			}
		}
	}
	err := errors.Join(errs...)
	if err == nil {
		fmt.Println("   no namespace, device, mount, directory or process is left")
	}
	return err
}
