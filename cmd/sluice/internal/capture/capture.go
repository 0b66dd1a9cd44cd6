// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package capture captures the packets of one container at its interface: packets that it sends, even if Sluice drops
// them later, and packets that reach it. It enters the network namespace itself, as root, because the datapath may
// not read packets (docs/decisions/capture-by-root.md).
package capture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/flagvalue"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/observe"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/kit/version"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

const (
	whole     = 256 << 10 // bytes of a packet: no GSO packet is larger
	flushSize = 64 << 10  // bytes that are buffered while packets arrive
	mostKinds = 64        // values of one filter
)

// Flags are the flags of `capture` and `kubernetes capture`.
type Flags struct {
	file      string
	force     bool // overwrite any regular file
	addresses []string
	ports     []uint
	protocols []string
	count     uint64
	duration  time.Duration
	snaplen   uint32
	maxSize   invocation.Size
	buffer    invocation.Size
	drops     bool
}

// Command is `capture`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var o Flags
	untilInputEnds := false
	cmd := &cobra.Command{
		Use:   "capture CONTAINER|POD",
		Short: "Capture the packets of a container, as pcapng",
		Long: `Capture the packets of a container at its interface, in both directions, as pcapng for
tcpdump and Wireshark. Packets that the container sends are captured even if Sluice drops
them afterwards. Packets that Sluice drops on the way to the container are not captured;
--drops prints the drops of both directions on standard error, as observe does. With
segmentation offload, packets are larger than the MTU; with checksum offload, their
checksums are wrong.

The command enters the container's network namespace, so it must run as root on the
machine. In a Kubernetes cluster, ` + "`kubectl sluice capture`" + ` captures the packets of any
pod. The capture ends on an interrupt, or at --count, --duration or --max-size; the last
line on standard error shows how many packets were captured and how many were lost.

` + endpoint.NameHelp,
		Example: `  sluice capture shop/web -w /tmp/web.pcapng --duration 30s
  sluice capture web --port 80 | tcpdump -nr -
  sluice capture web --address 10.244.1.7 --drops | wireshark -ki -`,
		Args: invocation.Args(1, endpoint.NameForms),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			if untilInputEnds {
				var stop func()
				ctx, stop = invocation.EndWith(ctx, cmd.InOrStdin())
				defer stop()
			}
			return o.run(ctx, inv, args[0])
		},
	}
	o.Add(cmd.Flags())
	invocation.ExitOnStdinEOFFlag(cmd, &untilInputEnds)
	return cmd
}

// Add adds the flags to a command.
func (o *Flags) Add(f *pflag.FlagSet) {
	o.maxSize, o.buffer = 1<<30, 8<<20
	f.StringVarP(&o.file, "write", "w", "",
		"write to FILE with mode 0600 (default: standard output, which must not be a terminal)")
	f.BoolVar(&o.force, "force", false, "overwrite FILE even if it is not a pcapng file")
	f.StringSliceVar(&o.addresses, "address", nil, "only packets with an address in this prefix on either side")
	f.UintSliceVar(&o.ports, "port", nil, "only packets with this port on either side")
	f.Lookup("port").DefValue = "" // otherwise help shows an empty list
	f.StringSliceVar(&o.protocols, "protocol", nil,
		"only packets of tcp, udp, sctp, icmp, icmpv6 or a protocol number; in IPv6 without extension headers")
	f.Uint64VarP(&o.count, "count", "c", 0, "stop after this many packets; 0: no limit")
	f.DurationVar(&o.duration, "duration", 0, "stop after this time; 0: no limit")
	f.Uint32VarP(&o.snaplen, "snaplen", "s", 0, "bytes of each packet; 0: the whole packet")
	f.Var(&o.maxSize, "max-size", "stop before the output exceeds this size; 0: no limit")
	f.Var(&o.buffer, "buffer",
		"size of the kernel's buffer for packets that are not yet written; packets that do not fit are lost and counted")
	f.BoolVar(&o.drops, "drops", false,
		"print the dropped packets of the container with the reasons on standard error")
}

// Check returns an error if the flags are invalid. stdout is the output of the command.
func (o *Flags) Check(stdout io.Writer, command string) error {
	if _, err := o.filter(); err != nil {
		return err
	}
	if o.file == "" && invocation.IsTerminal(stdout) {
		return invocation.Usagef("packets cannot be written to a terminal: give a file with -w, or use a pipe, as in "+
			"`%s | tcpdump -nr -`", command)
	}
	return nil
}

// Args returns the arguments for the same capture on another machine, which writes to its standard output.
func (o *Flags) Args() []string {
	args := []string{
		fmt.Sprintf("--count=%d", o.count), "--duration=" + o.duration.String(), fmt.Sprintf("--snaplen=%d", o.snaplen),
		"--max-size=" + o.maxSize.String(), "--buffer=" + o.buffer.String(),
	}
	for _, a := range o.addresses {
		args = append(args, "--address="+a)
	}
	for _, p := range o.ports {
		args = append(args, fmt.Sprintf("--port=%d", p))
	}
	for _, p := range o.protocols {
		args = append(args, "--protocol="+p)
	}
	if o.drops {
		args = append(args, "--drops")
	}
	return args
}

func (o *Flags) filter() (f filter, err error) {
	if len(o.addresses) > mostKinds || len(o.ports) > mostKinds || len(o.protocols) > mostKinds {
		return f, invocation.Usagef("more than %d values of one flag", mostKinds)
	}
	for _, text := range o.addresses {
		p, err := flagvalue.Prefix("--address", text)
		if err != nil {
			return f, err
		}
		f.prefixes = append(f.prefixes, p)
	}
	for _, p := range o.ports {
		if p > 65535 {
			return f, invocation.Usagef("--port: %d is not a port", p)
		}
		f.ports = append(f.ports, uint16(p))
	}
	for _, text := range o.protocols {
		n, err := flagvalue.Protocol("--protocol", text)
		if err != nil {
			return f, err
		}
		f.protocols = append(f.protocols, n)
	}
	switch {
	case o.snaplen > whole:
		return f, invocation.Usagef("--snaplen: %d is more than %d", o.snaplen, whole)
	case o.duration < 0:
		return f, invocation.Usagef("--duration: %s is negative", o.duration)
	case o.buffer < 2*blockSize || o.buffer > 1<<30:
		return f, invocation.Usagef("--buffer: %s is not from 2MiB to 1GiB", o.buffer)
	}
	if o.snaplen == 0 {
		o.snaplen = whole
	}
	return f, nil
}

func (o *Flags) run(ctx context.Context, inv *invocation.Invocation, name string) error {
	if err := o.Check(inv.Out, "sluice capture "+name); err != nil {
		return err
	}
	f, err := o.filter()
	if err != nil {
		return err
	}
	program, err := f.compile(o.snaplen)
	if err != nil {
		return fmt.Errorf("compile the filter: %w", err)
	}
	e, err := endpoint.Find(ctx, inv, name)
	if err != nil {
		return err
	}
	c := e.GetContainerInterface()
	s, err := openSocket(device{e.GetNetworkNamespace(), c.GetName(), int(c.GetIndex()), c.GetMac()}, program,
		int(o.buffer))
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("%w; only root on the machine can capture packets", err)
	}
	if err != nil {
		return err
	}
	defer s.Close()
	w, err := o.open(inv.Out)
	if err != nil {
		return err
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.duration)
		defer cancel()
	}
	if o.drops {
		stop := showDrops(ctx, inv, e)
		defer stop()
	}
	w.add(fileHeader(nil, version.Get().String(), c.GetName(), describe(e), o.snaplen))
	end, err := o.copy(ctx, s, w)
	if cerr := s.count(); err == nil {
		err = cerr
	}
	w.add(statisticsBlock(nil, time.Now(), s.seen, s.lost))
	err = errors.Join(err, w.close())
	fmt.Fprintf(inv.ErrOut, "%s captured, %d lost%s\n", output.Plural(w.packets, "packet", "packets"), s.lost, end)
	return err
}

// describe returns the description of the interface in the file.
func describe(e *datapathv1.Endpoint) string {
	text := "container " + workload.OwnerOf(e.GetOwner()).String()
	if p := e.GetPod(); p.GetName() != "" {
		text = "pod " + p.GetNamespace() + "/" + p.GetName() + ", " + text
	}
	return text
}

// showDrops prints dropped packets until stop is called.
func showDrops(ctx context.Context, inv *invocation.Invocation, e *datapathv1.Endpoint) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		errOut := *inv
		errOut.Out = inv.ErrOut
		if err := observe.Drops(ctx, &errOut, e.GetOwner()); err != nil && ctx.Err() == nil {
			inv.Note(fmt.Sprintf("drops are not shown: %v", err))
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// copy writes packets until ctx ends or a limit is reached. end describes an unexpected end.
func (o *Flags) copy(ctx context.Context, s *socket, w *writer) (end string, err error) {
	var ended time.Time // zero: not yet
	for {
		if ended.IsZero() && ctx.Err() != nil {
			ended = time.Now()
		}
		p, ok := s.receive()
		if !ok {
			// Flush, so that the reader of a pipe sees packets as they arrive.
			if err := w.flush(); err != nil {
				return "", err
			}
			// The last packets are in a block that the kernel hands over after blockRetire.
			if !ended.IsZero() && time.Since(ended) > 2*blockRetire*time.Millisecond {
				return "", nil
			}
			switch err := s.wait(blockRetire * time.Millisecond); {
			case errors.Is(err, unix.ENETDOWN), errors.Is(err, unix.ENXIO):
				return "; the interface is gone, or down", nil
			case err != nil:
				return "", fmt.Errorf("wait for packets: %w", err)
			}
			continue
		}
		if !ended.IsZero() && p.time.After(ended) {
			return "", nil
		}
		before := len(w.waiting)
		w.waiting = packetBlock(w.waiting, p)
		if o.maxSize > 0 && w.size+int64(len(w.waiting))+statisticsSize > int64(o.maxSize) {
			w.waiting = w.waiting[:before]
			return "; --max-size is reached", nil
		}
		if w.packets++; o.count > 0 && w.packets >= o.count {
			return "", nil
		}
		if len(w.waiting) >= flushSize {
			if err := w.flush(); err != nil {
				return "", err
			}
		}
	}
}

// statisticsSize is reserved for the last block of a file.
const statisticsSize = 64

// writer writes whole pcapng blocks.
type writer struct {
	out     io.Writer
	file    *os.File // nil: standard output
	waiting []byte
	size    int64 // bytes written
	packets uint64
}

// sectionBegin is the magic of a pcapng file.
var sectionBegin = []byte{0x0a, 0x0d, 0x0d, 0x0a}

func (o *Flags) open(stdout io.Writer) (*writer, error) {
	if o.file == "" {
		return &writer{out: stdout}, nil
	}
	f, err := os.OpenFile(o.file, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s is not a regular file", o.file)
	default:
		if err = output.CheckOwner(info); err != nil {
			err = fmt.Errorf("write %s: %w", o.file, err)
			break
		}
		if !o.force {
			if err = output.CheckKind(f, "a pcapng capture", sectionBegin); err != nil {
				err = fmt.Errorf("write %s: %w", o.file, err)
				break
			}
		}
		err = errors.Join(f.Chmod(0o600), f.Truncate(0))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return &writer{out: f, file: f}, nil
}

func (w *writer) add(block []byte) { w.waiting = append(w.waiting, block...) }

// flush writes the buffered blocks. After an error it truncates the file to the last whole block.
func (w *writer) flush() error {
	if len(w.waiting) == 0 {
		return nil
	}
	_, err := w.out.Write(w.waiting)
	if err != nil && w.file != nil {
		err = errors.Join(err, w.file.Truncate(w.size))
	}
	if err == nil {
		w.size += int64(len(w.waiting))
	}
	w.waiting = w.waiting[:0]
	return err
}

func (w *writer) close() error {
	err := w.flush()
	if w.file != nil {
		err = errors.Join(err, w.file.Close())
	}
	return err
}
