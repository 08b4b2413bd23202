# flannel's image: docker build -t localhost/flannel:v0.1.0 .
#
# One image for all containers of deploy/kube-flannel.yml. Its paths are those of Go flannel's two
# images. It is based on Debian, because firewall rules in iptables, the default, need the programs
# of iptables. Only the programs that are copied onto hosts are static.
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libprotobuf-dev protobuf-compiler
WORKDIR /src
COPY . .
ARG FLANNEL_COMMIT=
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    deploy/build-image-root.sh /image

FROM debian:bookworm-slim
# The variant of iptables, the same as on the hosts: nft, or legacy if `iptables --version` on a
# host says legacy.
ARG IPTABLES=nft
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates iptables \
    && rm -rf /var/lib/apt/lists/* \
    && update-alternatives --set iptables "/usr/sbin/iptables-$IPTABLES" \
    && update-alternatives --set ip6tables "/usr/sbin/ip6tables-$IPTABLES"
COPY --from=build /image/ /
ENV PATH=/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin
# After thousands of peers arrived at once, glibc returns their memory to the system.
ENV MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=32768 \
    MALLOC_TRIM_THRESHOLD_=32768 MALLOC_TOP_PAD_=16384
# The user is root, because the directories of the host usually belong to root. The containers have
# only the capabilities of the manifest: NET_ADMIN and NET_RAW for flanneld, DAC_OVERRIDE for
# install-conf.
ENTRYPOINT ["/opt/bin/flanneld"]
